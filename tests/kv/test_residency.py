"""Residency against a brute-force model that keeps every block's own time."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain, blocks_in, chain_of, hashes_of, root_of, tokens_of
from kvroute.kv.residency import GROUP_BLOCKS, Change, Residency, Run


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


class BruteForce:
    """One entry a block: (time of last use, depth). The oldest goes first, among equals the deepest."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.used: dict[int, tuple[int, int]] = {}
        self.below: dict[int, tuple[int, ...]] = {}
        self.now = 0

    def held(self, chain: PrefixChain) -> int:
        hashes = hashes_of(chain)
        return next((i for i, h in enumerate(hashes) if h not in self.used), len(hashes))

    def record(self, chain: PrefixChain) -> tuple[list[int], list[int]]:
        self.now += 1
        hashes = list(hashes_of(chain))[: self.capacity]
        stored = [h for h in hashes if h not in self.used]
        for depth, h in enumerate(hashes):
            self.used[h] = (self.now, -depth)
            self.below[h] = tuple(hashes[:depth])
        evicted = []
        while len(self.used) > self.capacity:
            oldest = min(self.used, key=lambda h: self.used[h])
            del self.used[oldest]
            evicted.append(oldest)
        return stored, evicted

    def correct(self, chain: PrefixChain, held: int) -> set[int]:
        if held >= blocks_in(chain) or self.held(chain) < held:
            return set()
        top = hashes_of(chain)[held]
        gone = {h for h in self.used if h == top or top in self.below[h]}
        for h in gone:
            del self.used[h]
        return gone


def blocks(runs: tuple[Run, ...]) -> list[int]:
    return [h for run in runs for h in memoryview(run.blocks).cast("Q")]


token_lists = st.lists(st.integers(0, 2), max_size=40)
growing = st.builds(
    lambda head, times: head * times, st.lists(st.integers(0, 1), min_size=1, max_size=9), st.integers(1, 5)
)
steps = st.lists(
    st.tuples(st.sampled_from(["record", "record", "record", "correct"]), token_lists | growing, st.integers(0, 40))
)


@given(st.integers(0, 40), steps)
@settings(max_examples=400, deadline=None)
def test_equals_the_brute_force_model(capacity, steps):
    """Every store, every eviction and every depth is the one that a model with one entry per block gives."""
    residency, model = Residency(capacity), BruteForce(capacity)
    for what, tokens, held in steps:
        link = chain(*tokens)
        if what == "record":
            before = model.held(PrefixChain(link[: capacity * 8]))
            change = residency.record(link)
            stored, evicted = model.record(link)
            assert change.held == before
            assert blocks((change.stored,) if change.stored else ()) == stored
            assert sorted(blocks(change.evicted)) == sorted(evicted)
        else:
            assert set(blocks(residency.correct(link, held).evicted)) == model.correct(link, held)
        assert len(residency) == len(model.used) <= capacity
        for _, other, _ in steps:
            assert residency.held(chain(*other)) == model.held(chain(*other))


@given(st.integers(1, 40), steps)
@settings(max_examples=100, deadline=None)
def test_snapshot_continues_as_the_original(capacity, steps):
    """A Residency rebuilt from its snapshot, or from its chains, evicts the same blocks as the original would."""
    original = Residency(capacity)
    for _, tokens, _ in steps:
        original.record(chain(*tokens))
    copy, rebuilt = Residency.unpack(original.pack()), Residency(capacity)
    fed = 0
    for link, known in original.chains():
        assert rebuilt.record(link).held >= known
        fed += blocks_in(link) - known
    assert fed == len(original)
    for _, tokens, _ in steps[::-1]:
        assert copy.record(chain(*tokens)) == original.record(chain(*tokens))


@given(steps)
@settings(max_examples=100, deadline=None)
def test_runs_name_the_group_they_begin_in(steps):
    """A run's hashes begin at a group boundary of its own chain, so that an index finds the group without the chain."""
    residency, seen = Residency(20), {}
    for _, tokens, _ in steps:
        link = chain(*tokens)
        seen.update({h: list(hashes_of(link))[: depth + 1] for depth, h in enumerate(hashes_of(link))})
        change = residency.record(link)
        for run in (*change.evicted, *((change.stored,) if change.stored else ())):
            hashes = list(memoryview(run.hashes).cast("Q"))
            path = seen[hashes[-1]]
            start = len(path) - len(hashes)
            assert start % GROUP_BLOCKS == 0
            assert run.skip < GROUP_BLOCKS
            assert path[start:] == hashes


def test_tail_dies_before_head():
    """Of one idle chain the tail goes first, and a block never outlives its parent."""
    residency = Residency(6)
    residency.record(chain(1, 2, 3, 4))
    assert residency.record(chain(7, 8, 9)) == Change(0, Run(0, chain(7, 8, 9)), (Run(3, chain(1, 2, 3, 4)),))
    assert residency.held(chain(1, 2, 3, 4)) == 3


def test_growing_conversation_stays_one_run():
    """A conversation that grows turn by turn is one run below what it shares with others."""
    residency = Residency(1000)
    for turn in range(1, 20):
        residency.record(chain(*range(100), 1000, *range(2000, 2000 + turn)))
        residency.record(chain(*range(100), 1001, *range(3000, 3000 + turn)))
    assert repr(residency) == "<Residency 140/1000 blocks in 3 runs>"


def test_correction_forgets_what_lies_below():
    """A block that turned out to be gone takes its descendants on every branch with it."""
    residency = Residency(100)
    residency.record(chain(1, 2, 3, 4))
    residency.record(chain(1, 2, 3, 5))
    residency.correct(chain(1, 2, 3, 9), 2)
    assert [residency.held(chain(1, 2, 3, 4)), residency.held(chain(1, 2, 3, 5)), len(residency)] == [2, 2, 2]


@pytest.mark.parametrize("data", [b"", b"\xc1", Residency(3).pack()[:-1], b"\x92\x01\x91\x92\x05\xc4\x08" + bytes(8)])
def test_bad_snapshot_is_refused(data):
    """Bytes that are no snapshot raise ValueError and build nothing."""
    with pytest.raises(ValueError, match=r"."):
        Residency.unpack(data)


def test_a_forgotten_chain_takes_what_only_it_needed():
    """Forgetting a chain drops it up to where a longer one parts from it; what is not held whole is left alone."""
    residency = Residency(100)
    for one in (chain(1, 2, 3), chain(1, 2, 4, 5)):
        residency.record(one)
    for one in (chain(1, 2, 4), chain(1, 2, 4, 9), chain(7), chain(1, 2, 4, 5)):
        residency.forget(one)
    assert [residency.held(one) for one in (chain(1, 2, 3), chain(1, 2, 4, 5))] == [3, 2]
    residency.forget(chain(1, 2, 3))
    assert (len(residency), list(residency.chains())) == (0, [])
