"""Hits of a hybrid end where vLLM's own lookup ends them."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.cells import cells_of, pack_cells
from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.events import decode_batch
from kvroute.kv.hit_ends import ENDS
from tests.kv.encoded import cleared, encoded, removed, stored

MODEL = "m"
WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
STATE = {"group_idx": 2, "kv_cache_spec_kind": "mamba"}


def tell(known: EngineHashes, *events: dict[str, Any], release: int = 32) -> EngineHashes:
    known.apply(decode_batch(encoded(list(events), release)))
    return known


def table(*events: dict[str, Any], release: int = 32) -> EngineHashes:
    return tell(EngineHashes(MODEL, 1000), *events, release=release)


def chain(*ids: int, size: int = 1) -> PrefixChain:
    return chain_of(tokens_of(ids), size, root_of(MODEL))


LONG = stored([1, 2, 3, 4, 5], None, [1, 2, 3, 4, 5], 1)


def test_a_window_needs_the_blocks_that_it_reaches_back_over():
    """A window of three tokens sees two before the next one: a hit ends where two blocks lie side by side, or where all
    from the root do; what forks off between is hit up to the end above it."""
    known = table(LONG, stored([1], None, [1], 1, **WINDOW), stored([4, 5], 1, [2, 3, 4, 5], 1, **WINDOW))
    assert known.held(chain(1, 2, 3, 4, 5)) == 5
    found = [known.reusable(chain(*ids)) for ids in ((1, 2, 3, 4, 5), (1, 2, 3, 4, 9), (1, 2, 3), (1, 9), (9,))]
    assert found == [5, 1, 1, 1, 0]


def test_a_state_is_needed_at_the_end_itself():
    """Of a Mamba group a hit needs the state at its last block, and nothing before it."""
    known = table(LONG, stored([2], None, [1, 2], 1, **STATE), stored([4], 2, [3, 4], 1, **STATE))
    assert [known.reusable(chain(*range(1, n + 1))) for n in (1, 2, 3, 4, 5)] == [0, 2, 2, 4, 4]


def test_every_sparse_group_has_a_say():
    """Groups may agree on an end that is none's longest."""
    windowed = stored([1, 2, 3], None, [1, 2, 3], 1, **WINDOW)
    known = table(LONG, windowed, stored([2, 5], None, [1, 2, 3, 4, 5], 1, **STATE))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 2


def test_removals_and_copies():
    """An end goes with the last copy of a block that it needs, in that group alone, and comes back with it."""
    known = table(LONG, stored([4, 5], 3, [4, 5], 1, **WINDOW), stored([4], 3, [4], 1, **WINDOW))
    tell(known, removed(4, group_idx=1))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 5
    tell(known, removed(4, group_idx=1))
    assert (known.reusable(chain(1, 2, 3, 4, 5)), known.held(chain(1, 2, 3, 4, 5))) == (0, 5)
    tell(known, stored([4], 3, [4], 1, **WINDOW), removed(5))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 0
    tell(known, stored([5], 4, [5], 1))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 5
    tell(known, cleared())
    assert (known.reusable(chain(1, 2, 3, 4, 5)), known.counters.unknown_removals) == (0, 0)


def test_order_within_a_batch_does_not_matter():
    """A sparse group may tell of a block before the full-attention group does."""
    known = table(stored([1, 2], None, [1, 2], 1, **WINDOW), stored([1, 2], None, [1, 2], 1))
    assert known.reusable(chain(1, 2)) == 2


def test_groups_of_larger_blocks_let_hits_end_at_theirs():
    """Blocks of four tokens beside blocks of two are named as every second of these is."""
    state = stored([2, 4], None, [*range(8)], 4, **STATE)
    known = table(stored([1, 2, 3, 4, 5], None, [*range(10)], 2), state)
    assert [known.reusable(chain(*range(n), size=2)) for n in (2, 4, 6, 8, 10)] == [0, 2, 2, 4, 4]


def test_releases_that_do_not_name_kinds():
    """Before 0.22 a group that leaves blocks out is known as sparse from then on: a hit ends at a block that it has."""
    sparse = [stored([1], None, [1], 1, group_idx=1), stored([4, 5], 1, [2, 3, 4, 5], 1, group_idx=1)]
    known = table(LONG, *sparse, release=20)
    assert [known.reusable(chain(*range(1, n + 1))) for n in (1, 3, 4, 5)] == [1, 1, 4, 5]
    assert tell(known, removed(5, group_idx=1), release=20).reusable(chain(1, 2, 3, 4, 5)) == 4


def test_larger_blocks_on_a_slower_tier_say_nothing_of_a_group():
    """What is copied to CPU memory may be told in blocks of another size: the group is not sparse for that."""
    known = table(LONG, stored([2, 4], None, [1, 2, 3, 4], 2, medium="CPU"), release=20)
    assert (known.reusable(chain(1, 2, 3, 4, 5)), known.counters.mismatches) == (5, 2)


@pytest.mark.parametrize("kind", ["chunked_local_attention", "unknown", "future"])
def test_groups_of_which_too_little_is_told_have_no_say(kind):
    """Where events do not tell what a group needs, full attention alone decides."""
    known = table(LONG, stored([5], 4, [5], 1, group_idx=1, kv_cache_spec_kind=kind))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 5


def test_after_lost_events_ends_are_learnt_anew():
    """A hole in the events may hide that any end is gone: none counts, until a request has found one or it is told."""
    known = table(LONG, stored([4, 5], 3, [4, 5], 1, **WINDOW), stored([2], 1, [2], 1, **WINDOW))
    known.suspect()
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 0
    known.delivered(chain(1, 2, 3, 4, 5), 5)
    assert [known.reusable(chain(*range(1, n + 1))) for n in (4, 5)] == [0, 5]
    tell(known, removed(4, group_idx=1))
    assert known.reusable(chain(1, 2, 3, 4, 5)) == 0
    known.delivered(chain(7, 8, 9), 2)
    assert (known.held(chain(7, 8)), known.reusable(chain(7, 8)), known.reusable(chain(7))) == (2, 2, 1)


class Engine:
    """vLLM's lookup (HybridKVCacheCoordinator, the managers' find_longest_cache_hit), over sets of names by group."""

    def __init__(self, needs: dict[int, int | None]) -> None:
        self.needs = needs  # group -> blocks of its window; None: a state
        self.copies: Counter[tuple[int, tuple[int, ...]]] = Counter()

    def has(self, group: int, name: tuple[int, ...]) -> bool:
        return self.copies[group, name] > 0

    def hit(self, ids: tuple[int, ...]) -> int:
        length = 0
        while length < len(ids) and self.has(0, ids[: length + 1]):
            length += 1
        while True:
            shorter = length
            for group, need in self.needs.items():
                shorter = self._window(group, ids, shorter, need) if need else self._state(group, ids, shorter)
            if shorter == length:
                return length
            length = shorter

    def _window(self, group: int, ids: tuple[int, ...], most: int, need: int) -> int:
        run = 0
        for at in range(most - 1, -1, -1):
            run = run + 1 if self.has(group, ids[: at + 1]) else 0
            if run >= need:
                return at + run
        return run

    def _state(self, group: int, ids: tuple[int, ...], most: int) -> int:
        return next((at for at in range(most, 0, -1) if self.has(group, ids[:at])), 0)


KINDS = {1: WINDOW, 2: STATE, 3: WINDOW | {"group_idx": 3, "kv_cache_spec_sliding_window": 5}}
ids = st.lists(st.integers(1, 2), min_size=1, max_size=7).map(tuple)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.sets(st.sampled_from([1, 2, 3]), min_size=1), st.data())
def test_any_history(groups, data):
    """Whatever is stored and removed, by group and in any order: a prompt's hit is as long as vLLM's lookup makes it,
    and what a store was told adds up to the ends."""
    known = EngineHashes(MODEL, 1000)
    engine = Engine({group: {1: 2, 2: None, 3: 4}[group] for group in groups})
    told: set[int] = set()
    for group in groups:
        tell(known, stored([], None, [], 1, **KINDS[group]))
    for _ in range(data.draw(st.integers(1, 25))):
        what = data.draw(st.sampled_from(["store", "store", "store", "remove", "remove", "clear", "snapshot"]))
        if what == "store":
            _store(known, engine, data)
        elif what == "remove" and (there := [key for key in sorted(engine.copies) if engine.copies[key] > 0]):
            group, name = data.draw(st.sampled_from(there))
            engine.copies[group, name] -= 1
            tell(known, removed(_named(name), group_idx=group))
        elif what == "clear" and data.draw(st.booleans()):
            engine.copies.clear()
            tell(known, cleared())
        elif what == "snapshot":
            told = _told(known, told)
            known = EngineHashes.unpack(known.pack(), MODEL, 1000)
        asked = data.draw(ids)
        assert known.reusable(chain(*asked)) == engine.hit(asked)
    assert _told(known, told) == set(known.ends.cells)
    everything = {change.tier: change.added for change in known.everything()}
    assert everything[ENDS] == pack_cells(known.ends.cells)


def _store(known: EngineHashes, engine: Engine, data: st.DataObject) -> None:
    """A request is computed: full attention stores what it lacks, the others some of that, in any order of groups."""
    prompt = data.draw(ids)
    start = next((n for n in range(len(prompt)) if not engine.has(0, prompt[: n + 1])), len(prompt) - 1)
    names = list(_prefixes(prompt, start))
    parent = _named(prompt[:start]) if start else None
    events = []
    for group in data.draw(st.permutations([0, *engine.needs])):
        kept = [name for name in names if not group or data.draw(st.booleans())]
        engine.copies.update((group, name) for name in kept)
        rest = KINDS.get(group, {})
        events.append(stored([_named(name) for name in kept], parent, list(prompt[start:]), 1, **rest))
    tell(known, *events)


def _prefixes(prompt: tuple[int, ...], start: int) -> Iterator[tuple[int, ...]]:
    return (prompt[: end + 1] for end in range(start, len(prompt)))


def _named(name: tuple[int, ...]) -> int:
    return int("".join(map(str, name)))


def _told(known: EngineHashes, before: set[int]) -> set[int]:
    for change in known.changes():
        if change.tier == ENDS:
            before = before - set(memoryview(change.gone).cast("Q")) | set(memoryview(change.added).cast("Q"))
    return before


def test_cells_are_those_of_chains():
    """Ends are told as the index keeps blocks."""
    known = table(LONG, stored([4, 5], 3, [4, 5], 1, **WINDOW))
    assert _told(known, set()) == {list(cells_of(chain(1, 2, 3, 4, 5)))[-1]}


class Counted(array):
    """Counts how often it is read."""

    reads = 0

    def __getitem__(self, at):
        self.reads += 1
        return super().__getitem__(at)


@pytest.mark.parametrize(
    ("group", "size", "order"),
    [(STATE, 4, 1), (STATE, 4, -1), (WINDOW | {"kv_cache_spec_sliding_window": 4000}, 1, -1)],
)
def test_settling_is_linear(group, size, order):
    """However deep a chain is, and in whatever order an engine tells of it, a block costs the same: of a group
    with larger blocks than the tree's, and of a window as wide as the chain."""
    per_block = []
    for count in (400, 1600):
        known = EngineHashes(MODEL, 10_000)
        known.tree._parent = Counted("i")
        names = list(range(1, count + 1))
        tell(known, stored([], None, [], size, **group), stored(names, None, names, 1)).changes()
        kept = names[size - 1 :: size]
        tell(known, *[stored([name], None, [1] * size, size, **group) for name in kept[::order]])
        known.changes()
        assert len(known.ends.cells) == len(kept)
        per_block.append(known.tree._parent.reads / count)
    assert per_block[1] <= 1.1 * per_block[0]
