"""Conversations are recognised from chains alone."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain, hashes_of
from kvroute.routing.conversations import Conversation, Conversations
from kvroute.routing.demand import Demand
from tests.routing.builders import ask, chain


def turn(blocks: int, root: int = 0, tokens: int | None = None) -> Demand:
    return ask(blocks * 16 + 3 if tokens is None else tokens, chain=chain(blocks, root=root))


@pytest.mark.parametrize(("first", "second"), [(1, 2), (3, 7), (7, 8), (8, 9), (8, 400), (15, 16), (100, 101)])
def test_a_prompt_that_extends_an_earlier_one_goes_on_with_it(first: int, second: int):
    """Wherever the tip lies, the second turn is the same conversation, and what it added is known."""
    known = Conversations()
    one = known.recognise(turn(first), 0, 0.0)
    two = known.recognise(turn(second), 0, 1.0)
    assert one is two
    assert (two.turns, two.tokens, two.growth_tokens) == (2, second * 16 + 3, (second - first) * 16)


def test_a_shorter_or_other_prompt_is_another_conversation():
    """Containing part of a prompt, or another root, continues nothing."""
    known = Conversations()
    one = known.recognise(turn(20), 0, 0.0)
    assert known.recognise(turn(19), 0, 1.0) is not one
    assert known.recognise(turn(40, root=9), 0, 1.0) is not one
    assert known.recognise(turn(21), 0, 1.0) is one


def test_conversations_with_one_beginning_are_told_apart():
    """After a shared system prompt of 40 blocks each goes on with its own."""
    ids = {}
    known = Conversations()
    for name, start in (("a", 0), ("b", 5_000)):
        ids[name] = [*range(40 * 16), *range(start + 10_000, start + 10_000 + 64)]
    from kvroute.kv.chain import Root, chain_of, tokens_of

    chains = {name: chain_of(tokens_of(each), 16, Root(0)) for name, each in ids.items()}
    a, b = (known.recognise(ask(700, chain=chains[name]), 640, 0.0) for name in "ab")
    assert a is not b
    assert (a.shared_tokens, a.own_tokens) == (640, 60)
    longer = chain_of(tokens_of([*ids["a"], *range(32)]), 16, Root(0))
    assert known.recognise(ask(740, chain=longer), 0, 1.0) is a


def test_a_second_request_beside_one_under_way_is_a_branch():
    """Two prompts that extend one history at the same time are two conversations."""
    known = Conversations()
    one = known.recognise(turn(20), 0, 0.0)
    one.is_under_way = True
    two = known.recognise(turn(22), 0, 1.0)
    assert two is not one
    one.is_under_way = False
    assert known.recognise(turn(21), 0, 2.0) is one


def test_identical_prompts_are_as_many_conversations():
    """Of 64 equal prompts at once each is continued once."""
    known = Conversations()
    first = [known.recognise(turn(20), 0, 0.0) for _ in range(1)]
    first[0].is_under_way = True
    for _ in range(7):
        first.append(known.recognise(turn(20), 0, 0.0))
        first[-1].is_under_way = True
    assert len(set(map(id, first))) == 8
    for each in first:
        each.is_under_way = False
    second = []
    for _ in range(8):
        second.append(known.recognise(turn(30), 0, 1.0))
        second[-1].is_under_way = True
    assert set(map(id, second)) == set(map(id, first))


def test_a_prompt_of_less_than_a_block_is_never_recognised():
    """It leaves nothing behind by which it could be."""
    known = Conversations()
    one = known.recognise(ask(5), 0, 0.0)
    assert known.recognise(ask(5), 0, 1.0) is not one


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 40)), max_size=60))
def test_memory_is_bounded(turns: list[tuple[int, int]]):
    """Never more conversations than the limit, and no tip outlives its conversation."""
    known = Conversations(limit=3)
    for root, blocks in turns:
        known.recognise(turn(blocks, root=root), 0, 0.0)
        assert len(known) <= 3
        assert sum(len(each) for tips in known._tips.values() for each in tips.values()) <= 3


def test_an_answer_that_the_next_prompt_leaves_out_is_no_part_of_the_history():
    """Prompts that do not go on behind the answer, as where reasoning is dropped: from then on none is counted."""
    known = Conversations()
    one = known.recognise(turn(20), 0, 0.0)
    one.answered(500)
    assert one.tokens == 323 + 500
    known.recognise(turn(25), 0, 1.0)
    assert (one.tokens, one.growth_tokens, one.keeps_answers) == (403, 80, False)
    one.answered(500)
    assert one.tokens == 403


def test_an_answer_that_the_next_prompt_holds_stays():
    """A prompt that is longer than prompt and answer added to both."""
    known = Conversations()
    one = known.recognise(turn(20), 0, 0.0)
    one.answered(64)
    known.recognise(turn(25), 0, 1.0)
    assert (one.tokens, one.growth_tokens, one.keeps_answers) == (403, 16, True)


def test_who_came_first_shares_its_beginning_with_those_that_came_later():
    """The first prompt of a group holds the prefix alone until another one begins with it; then it counts once."""
    from kvroute.kv.chain import Root, chain_of, tokens_of

    known = Conversations()
    prompts = [[*range(40 * 16), *range(start, start + 64)] for start in (10_000, 20_000)]
    chains = [chain_of(tokens_of(each), 16, Root(0)) for each in prompts]
    first = known.recognise(ask(704, chain=chains[0]), 0, 0.0)
    assert known.recognise(ask(704, chain=chains[0]), 0, 1.0) is first
    assert first.own_tokens == 704
    second = known.recognise(ask(704, chain=chains[1]), 640, 2.0)
    assert known.recognise(ask(704, chain=chains[0]), 700, 3.0) is first
    assert (first.prefix, first.own_tokens) == (second.prefix, 64)


def begun(known: Conversations, root: int, number: int, shared_blocks: int = 0) -> Conversation:
    """Begin a conversation whose first 40 blocks are those of all with this root."""
    blocks = [*hashes_of(chain(40, root=root)), *hashes_of(chain(10, root=1_000 + number))]
    prompt = ask(50 * 16, chain=PrefixChain(array("Q", blocks).tobytes()))
    return known.recognise(prompt, shared_blocks * 16, 0.0)


def test_what_prompts_share_is_seen_before_any_cache_has_it():
    """Once prefixes of 40 blocks are known, the second of a new group has one too, although the first still waits."""
    known = Conversations()
    begun(known, 1, 1)
    begun(known, 1, 2, shared_blocks=40)
    assert begun(known, 2, 3).shared_tokens == 0
    assert begun(known, 2, 4).shared_tokens == 40 * 16
    assert begun(known, 3, 5).shared_tokens == 0


def test_a_twin_shares_its_whole_prompt_and_within_it_what_all_share():
    """The prompt of one that is under way, once more: its prefix begins with the group's."""
    known = Conversations()
    begun(known, 1, 1)
    begun(known, 1, 2, shared_blocks=40).is_under_way = True
    twin = begun(known, 1, 2, shared_blocks=50).common
    assert twin is not None
    assert twin.parent is not None
    assert (twin.tokens, twin.parent.tokens) == (50 * 16, 40 * 16)


def test_lengths_that_are_rare_do_not_push_out_the_usual_one():
    """Prompts of which a part was evicted share odd lengths: the frequent one is still looked for."""
    known = Conversations()
    for number in range(20):
        begun(known, 1, number, shared_blocks=40)
    for number in range(200):
        known.recognise(turn(300, root=number + 50), (number + 41) * 16, 0.0)
    begun(known, 2, 900)
    assert begun(known, 2, 901).shared_tokens == 40 * 16
