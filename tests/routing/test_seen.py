"""The window of blocks that went through lately."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain, blocks_in, chain_of, root_of, tokens_of
from kvroute.routing.seen import EXACT_BLOCKS, STRIDE, SeenWindow

ROOT = root_of("m")


def chain(*tokens: int) -> PrefixChain:
    """Make a chain of one-token blocks."""
    return chain_of(tokens_of(tokens), 1, ROOT)


def test_what_was_added_is_seen_up_to_where_it_differs():
    """A chain's seen depth is its longest prefix with any chain that was added."""
    window = SeenWindow()
    window.add(chain(1, 2, 3, 4))
    window.add(chain(1, 9))
    assert [window.seen_blocks(each) for each in (chain(1, 2, 3, 5), chain(1, 9, 3), chain(2, 2), chain())] == [
        3,
        2,
        0,
        0,
    ]


def test_the_window_is_bounded_and_keeps_what_was_used_lately():
    """Old chains are forgotten, one that keeps coming is not."""
    window = SeenWindow(limit_marks=200)
    hot = chain(*range(20))
    for number in range(1_000):
        window.add(hot)
        window.add(chain(1_000 + number, 1, 2))
        assert len(window) <= 200
        assert window.seen_blocks(hot) == 20
    assert window.seen_blocks(chain(1_000, 1, 2)) == 0


def test_a_chain_longer_than_the_window_is_kept_in_part():
    """An enormous prompt neither breaks the bound nor the rule."""
    window = SeenWindow(limit_marks=100)
    long = PrefixChain(array("Q", range(1, 10_000)).tobytes())
    window.add(long)
    assert window.seen_blocks(long) == 50


@given(st.lists(st.lists(st.integers(0, 2), max_size=8), max_size=40), st.integers(2, 60))
def test_depths_agree_with_a_plain_search(prompts: list[list[int]], limit: int):
    """Bisection finds what counting block by block finds, whatever was forgotten in between."""
    window = SeenWindow(limit)
    for prompt in prompts:
        for probe in prompts:
            found = window.seen_blocks(chain(*probe))
            held = window._young | window._old
            hashes = memoryview(chain(*probe)).cast("Q") if probe else []
            assert all(hash_ in held for hash_ in hashes[:found])
            assert found == len(hashes) or hashes[found] not in held
        window.add(chain(*prompt))
        assert window.seen_blocks(chain(*prompt)) >= min(blocks_in(chain(*prompt)), max(limit // 2, 1))


@given(st.integers(0, 600), st.integers(0, 600))
def test_long_chains_are_seen_to_within_a_stride(shared: int, more: int):
    """Of a long prompt the depth is never too large, and less than a stride too small; of a short one it is exact."""
    window = SeenWindow()
    window.add(chain(*range(shared), *range(1_000, 1_000 + more)))
    found = window.seen_blocks(chain(*range(shared), *range(2_000, 2_000 + more)))
    assert shared - STRIDE < found <= shared
    assert found == shared or shared > EXACT_BLOCKS


@given(
    st.lists(st.tuples(st.integers(0, 120), st.integers(0, 3), st.integers(0, 30)), max_size=30), st.integers(2, 200)
)
def test_seeing_is_looking_and_then_adding(prompts: list[tuple[int, int, int]], limit: int):
    """In one step as in two: what was seen before is returned, and the chain is in the window afterwards."""
    once, twice = SeenWindow(limit), SeenWindow(limit)
    for shared, branch, more in prompts:
        prompt = chain(*range(shared), *range(1_000 * branch, 1_000 * branch + more))
        seen = twice.seen_blocks(prompt)
        twice.add(prompt)
        assert once.see(prompt) == seen
    assert (once._young, once._old) == (twice._young, twice._old)
