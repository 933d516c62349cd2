"""After events were lost, what is certain is so, and what is not certain does not stay."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.cells import cells_of
from kvroute.kv.chain import PrefixChain, hashes_of
from kvroute.kv.engine_hashes import SUSPECT_DELIVERIES, EngineHashes
from kvroute.kv.event_keys import GROUPS_MAX
from kvroute.kv.events import ENGINE_HASH_BYTES_MAX, REPORT_SESSION
from tests.kv.encoded import removed, stored
from tests.kv.test_engine_hashes import MODEL, chain, published, table, tell

CPU = {"medium": "CPU"}


def again(known: EngineHashes) -> EngineHashes:
    return EngineHashes.unpack(known.pack(), MODEL, known.capacity_blocks)


def test_a_suspect_that_was_removed_may_hold_others():
    """A block goes by its own event and stays only for those below it; a delivery that ends above them ends all."""
    known = table(stored([1, 2, 3], None, [5, 6, 7], 1), stored([9], None, [9], 1))
    known.suspect()
    tell(known, removed(1), removed(2))
    known.delivered(chain(5, 6, 7), 0)
    assert (len(known), known.suspects, known.held(chain(9))) == (1, 1, 1)


@pytest.mark.parametrize("group", [0, None])
def test_what_is_learnt_before_the_first_group_is_named(group):
    """A delivery may come before the first block is told of. What it taught, and what is told then, both count, also
    for a successor."""
    known = EngineHashes(MODEL, 1000)
    known.suspect()
    known.delivered(chain(5, 6), 2)
    known = again(known)
    tell(known, stored([1, 2], None, [7, 8], 1, group_idx=group))
    assert [known.held(one) for one in (chain(5, 6), chain(7, 8))] == [2, 2]
    tell(known, removed(2, group_idx=group))
    known.delivered(chain(5, 6), 1)
    assert [known.held(one) for one in (chain(5, 6), chain(7, 8))] == [1, 1]


@pytest.mark.parametrize("length", [8, 15, ENGINE_HASH_BYTES_MAX])
def test_names_of_learnt_blocks_are_no_engines(length):
    """Whatever bytes an engine calls its blocks by, none of them is what deliveries taught."""
    known = table(stored([1], None, [9], 1))
    known.suspect()
    known.delivered(chain(5, 6), 2)
    own = hashes_of(chain(5))[0].to_bytes(8, "little")
    name = (b"learnt " + own).rjust(length, b"\0")[-length:]
    tell(known, stored([name], None, [7], 1), removed(name))
    assert [known.held(one) for one in (chain(5, 6), chain(7))] == [2, 0]
    for _ in range(SUSPECT_DELIVERIES):
        known.delivered(chain(3), 0)
    assert len(known) == 0


def test_what_lies_on_slower_tiers_is_vouched_for_by_no_gpu():
    """A block that is built on is on the GPU; that its copy in CPU memory is still there nobody has said."""
    known = table(stored([1], None, [5], 1), stored([1], None, [5], 1, **CPU), stored([7], None, [8], 1, **CPU))
    known.suspect()
    tell(known, stored([2], 1, [6], 1), stored([9], 7, [9], 1, **CPU))
    assert (known.suspects, known.held(chain(5, 6))) == (1, 2)
    tell(known, removed(2), removed(1))
    assert (known.held(chain(5), 1), known.held(chain(8), 1)) == (0, 1)
    known.delivered(chain(8), 1)
    assert (known.held(chain(8), 1), known.suspects) == (1, 1)
    for _ in range(SUSPECT_DELIVERIES):
        known.delivered(chain(3), 0)
    assert (known.held(chain(8), 1), known.suspects) == (0, 0)


def test_a_copy_to_a_slower_tier_confirms_nothing():
    """It may be made long after its request, of which the blocks above are gone."""
    known = table(stored([1, 2], None, [5, 6], 1))
    known.suspect()
    tell(known, stored([2], 1, [6], 1, **CPU), stored([3], 2, [7], 1, **CPU))
    assert (known.suspects, known.held(chain(5, 6, 7)), known.held(chain(5, 6, 7), 1)) == (2, 2, 3)


def test_what_was_learnt_ends_where_the_engine_has_named_it():
    """A delivery taught a longer prompt than the engine was asked to name. When the rest goes, so does all that was
    learnt, and nothing is in doubt any more."""
    known = table(stored([1], None, [3], 1))
    known.suspect()
    known.delivered(chain(3), 1)
    known.delivered(chain(5, 6, 7, 8), 4)
    tell(known, stored([2, 4], None, [5, 6], 1, session_id=REPORT_SESSION))
    known.delivered(chain(5, 6, 7, 8), 3)
    assert (known.held(chain(5, 6, 7, 8)), known.suspects) == (3, 3)
    known.delivered(chain(5, 6, 7), 2)
    assert (known.held(chain(5, 6, 7)), known.suspects, len(known)) == (2, 0, 3)


def test_a_group_found_out_to_be_sparse_takes_up_no_room():
    """What counts against the capacity is what the first of the other groups has: no suspect goes to make room."""
    known = table(
        stored([1, 2, 3, 4], None, [5, 6, 7, 8], 1, group_idx=0),
        stored([1, 2], None, [5, 6], 1, group_idx=1),
        capacity=3,
        release=20,
    )
    known.suspect()
    tell(known, stored([9], None, [1, 2], 1, group_idx=0), release=20)
    assert (known.held(chain(5, 6)), known.suspects, known.counters.dropped) == (2, 2, 0)


def test_no_more_groups_than_a_model_can_have():
    """An engine that names ever new groups, of any kind, has those refused that no model has."""
    known = EngineHashes(MODEL, 10)
    for group in range(3 * GROUPS_MAX):
        tell(known, stored([1], None, [5], 1, group_idx=group))
        tell(known, stored([1], None, [5], 1, group_idx=1000 + group, kv_cache_spec_kind="mamba"))
        tell(known, stored([1, 2], None, [5], 1, group_idx=2000 + group), release=20)
    packed = len(known.pack())
    tell(known, stored([1], None, [5], 1, group_idx=9999))
    assert (known.counters.refused, len(known.pack())) == (2 * GROUPS_MAX + 1, packed)
    assert (len(known.ends.groups), len(known._sparse), len(known._copies)) == (GROUPS_MAX,) * 3


def test_a_delivery_of_more_than_the_prompt():
    """An engine that counts other tokens than we do may have found more blocks than a chain has: all of it."""
    known = table(stored([1], None, [5], 1))
    known.suspect()
    known.delivered(chain(5, 6), 7)
    assert known.held(chain(5, 6)) == 2


class Engine:
    """A cache of so many blocks, the least recently used ones first to go, and CPU memory where whatever is stored is
    copied to, if it is there; what it holds, and what it says of that."""

    def __init__(self, capacity: int, cpu: int, *, has_duplicates: bool) -> None:
        self.capacity, self.has_duplicates = capacity, has_duplicates
        self.gpu: list[tuple[int, ...]] = []  # oldest first
        self.cpu: list[tuple[int, ...]] = []
        self.cpu_capacity = cpu

    def serve(self, ids: tuple[int, ...]) -> tuple[int, list]:
        """Return how many blocks a prompt found, and the events of its way."""
        blocks = [ids[: n + 1] for n in range(len(ids))]
        found = next((n for n, one in enumerate(blocks) if one not in self.gpu and one not in self.cpu), len(ids))
        here = next((n for n, one in enumerate(blocks) if one not in self.gpu), len(ids))
        if self.has_duplicates and here == found == len(ids):
            here = found = found - 1  # a prompt's last token is always computed, and with it its block
        events = []
        for one in blocks[:here]:
            self.gpu.remove(one)
        while self.gpu and len(self.gpu) + len(blocks) > self.capacity:
            events.append(removed(name(self.gpu.pop(0))))
        for one in blocks[here:]:
            events.append(stored([name(one)], name(one[:-1]), [one[-1]], 1))
        for one in blocks[here:] if self.cpu_capacity else ():
            if one not in self.cpu:
                if len(self.cpu) == self.cpu_capacity:
                    events.append(removed(name(self.cpu.pop(0)), **CPU))
                self.cpu.append(one)
                events.append(stored([name(one)], name(one[:-1]), [one[-1]], 1, **CPU))
        self.gpu += reversed(blocks)
        return found, events


def name(ids: tuple[int, ...]) -> int | None:
    return int("1" + "".join(map(str, ids))) if ids else None


def untrue(known: EngineHashes, engine: Engine) -> list[str]:
    """Name what is held for certain and not there."""
    truth = Counter(name(one) for one in engine.gpu), Counter(name(one) for one in engine.cpu)
    wrong = []
    for one, block in known._blocks.items():
        for tier in (0, 1):
            if known.tree.held(block) >> tier & 1 and block not in known._suspects and not truth[tier][one]:
                wrong.append(f"{one} on {tier}")
    return wrong


prompts = st.lists(st.integers(0, 2), min_size=1, max_size=5).map(tuple)
acts = st.lists(st.tuples(prompts, st.sampled_from(["heard"] * 4 + ["lost", "reported", "packed"])), max_size=60)


@settings(max_examples=400, deadline=None)
@given(acts, st.integers(5, 9), st.sampled_from([0, 0, 3, 12]), st.booleans())
def test_what_is_certain_is_so(history, capacity, cpu, has_duplicates):
    """Whatever an engine evicts while nobody hears it, with memory behind its cache or without: what is held and not
    in doubt is there, a prompt is found as deep as is certain, and all that is believed is one table."""
    engine, known, is_lost = Engine(capacity, cpu, has_duplicates=has_duplicates), EngineHashes(MODEL, capacity), False
    for ids, fate in history:
        found, events = engine.serve(ids)
        if fate == "lost":
            is_lost = True
            continue
        if is_lost:
            known.suspect()
            is_lost = False
        tell(known, *events)
        known.delivered(chain(*ids), found)
        if fate == "reported" and found and engine.cpu_capacity == 0:
            names = [name(ids[: n + 1]) for n in range(found)]
            tell(known, stored(names, None, list(ids[:found]), 1, session_id=REPORT_SESSION))
        if fate == "packed":
            known = again(known)
        assert untrue(known, engine) == []
        assert known.held(chain(*ids)) >= (found if not cpu else 0)
        assert known._copies.on_gpu == sum(known._copies.gpu)
        assert set(known._suspects) <= set(known._blocks.values())
        assert known._learnt <= set(known._suspects)
    if is_lost:
        known.suspect()
    certain = {known.tree.cell(block) for block in known._blocks.values() if block not in known._suspects}
    for _ in range(SUSPECT_DELIVERIES + 1):
        known.delivered(chain(7), 0)
    assert known.suspects == 0
    assert published(known) <= certain
    assert published(known) <= {cell for one in engine.gpu for cell in list(cells_of(chain(*one)))[-1:]}


def test_a_learnt_block_is_one_of_its_own():
    """The engine's own word about the same content is another block, and counts beside it."""
    known = table(stored([1], None, [3], 1))
    known.suspect()
    known.delivered(chain(5, 6), 2)
    tell(known, stored([2, 4], None, [5, 6], 1))
    assert (known.held(chain(5, 6)), len(known)) == (2, 5)
    one: PrefixChain = chain(5, 6)
    assert published(known) >= set(cells_of(one))
