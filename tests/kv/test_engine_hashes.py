"""The table says of every prefix what a plain reading of all events says, whatever the engine does."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.cells import cells_of
from kvroute.kv.chain import PrefixChain, chain_of, hashes_of, root_of, tokens_of
from kvroute.kv.engine_hashes import BLOCKS_PER_CAPACITY, BLOCKS_SPARE, SUSPECT_DELIVERIES, EngineHashes
from kvroute.kv.events import REPORT_SESSION, decode_batch
from tests.kv.encoded import RELEASES, cleared, encoded, payloads, recorded, removed, stored

MODEL = "m"


def table(*events, capacity: int = 1000, release: int = 32) -> EngineHashes:
    fresh = EngineHashes(MODEL, capacity)
    tell(fresh, *events, release=release)
    return fresh


def tell(known: EngineHashes, *events, release: int = 32) -> None:
    known.apply(decode_batch(encoded(list(events), release)))


def chain(*ids: int, block_size: int = 1, lora: str | None = None, salt: str | None = None) -> PrefixChain:
    return chain_of(tokens_of(ids), block_size, root_of(MODEL, lora, salt))


def published(known: EngineHashes, tier: int = 0) -> set[int]:
    return set(known.tree.cells[tier])


def test_a_prompt_is_held_as_deep_as_it_was_stored():
    """What was stored is found by the chain of the same tokens, and no deeper."""
    known = table(stored([11, 12], None, [1, 2, 3, 4], 2), stored([13], 12, [5, 6], 2))
    assert [known.held(chain(*ids, block_size=2)) for ids in ((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 9, 9), (9,))] == [
        3,
        1,
        0,
    ]
    assert known.block_size == 2


def test_copies_are_counted():
    """A block stored twice is held until it was removed twice."""
    known = table(stored([1, 2], None, [5, 6], 1), stored([2], 1, [6], 1), removed(2))
    assert known.held(chain(5, 6)) == 2
    tell(known, removed(2))
    assert known.held(chain(5, 6)) == 1
    tell(known, removed(2))
    assert (known.held(chain(5, 6)), known.counters.unknown_removals) == (1, 1)


def test_the_middle_may_go_first():
    """Without a block nothing below it can be hit; when it is stored again, all of it can."""
    known = table(stored([1, 2, 3], None, [5, 6, 7], 1), removed(2))
    assert known.held(chain(5, 6, 7)) == 1
    tell(known, stored([2], 1, [6], 1))
    assert known.held(chain(5, 6, 7)) == 3
    tell(known, removed(1), removed(2), removed(3))
    assert (known.held(chain(5, 6, 7)), len(known)) == (0, 0)


def test_adapters_and_salts_have_chains_of_their_own():
    """The same tokens under a base model, an adapter, a salt and both are four prefixes, as they are in the router."""
    known = table(
        stored([1], None, [5], 1),
        stored([2, 12], None, [5, 6], 1, lora_name="a", lora_id=1, extra_keys=[["a"], ["a"]]),
        stored([3, 13], None, [5, 6], 1, extra_keys=[["s"], None]),
        stored([4], None, [5], 1, lora_name="a", lora_id=1, extra_keys=[["a", "s"]]),
    )
    depths = [known.held(chain(5, 6, lora=lora, salt=salt)) for lora in (None, "a") for salt in (None, "s", "other")]
    assert depths == [1, 2, 0, 2, 1, 0]


def test_a_salt_that_is_called_like_the_adapter():
    """An adapter's name is taken off the keys once: what follows is the salt, even if it is the same word."""
    known = table(stored([4], None, [5], 1, lora_name="a", lora_id=1, extra_keys=[["a", "a"]]))
    assert [known.held(chain(5, lora="a", salt=salt)) for salt in ("a", None)] == [1, 0]


@pytest.mark.parametrize("keys", [[["img", 0]], [["img", -3]], ["unknown"], ["a", "b"]])
def test_what_no_chain_can_name_ends_it(keys):
    """From the first block with media, or with anything unknown, on, blocks are remembered and never published."""
    known = table(stored([1, 2, 3], None, [5, 6, 7], 1, extra_keys=[None, keys, None]), stored([4], 3, [8], 1))
    assert (known.held(chain(5, 6, 7, 8)), len(known), known.counters.unknown_parents) == (1, 4, 0)
    tell(known, removed(4), removed(3), removed(2))
    assert (len(known), known.counters.unknown_removals) == (1, 0)


def test_an_adapter_without_a_name_is_not_published():
    """Releases before 0.14 give an adapter's number only: its blocks must not pass for the base model's."""
    known = table(stored([1], None, [5], 1, lora_id=3, lora_name="a"), stored([2], 1, [6], 1, lora_id=3), release=9)
    assert (published(known), known.counters.opaque) == (set(), 2)


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "unknown", "future"])
def test_sparse_groups_are_skipped(kind):
    """A group whose blocks go while later ones stay promises nothing."""
    known = table(
        stored([1], None, [5], 1, group_idx=0, kv_cache_spec_kind=kind),
        stored([1, 2], None, [5, 6], 1, group_idx=1, kv_cache_spec_kind="mla_attention"),
        removed(1, group_idx=0),
    )
    assert (known.held(chain(5, 6)), known.counters.sparse) == (2, 1)


def test_a_sparse_group_without_a_name_is_found_out():
    """Releases before 0.22 do not say a group's kind: once its hashes do not fit its tokens, it is not counted on."""
    full = stored([1, 2], None, [5, 6], 1, group_idx=1)
    known = table(stored([1, 2], None, [5, 6], 1, group_idx=0), full, release=20)
    tell(known, stored([3], None, [7, 8], 1, group_idx=0), removed(1, group_idx=0), release=20)
    assert (known.held(chain(5, 6)), known.counters.mismatches) == (2, 1)


def test_every_full_group_must_have_a_block():
    """Of a model with two full-attention groups a block can be hit while both have it."""
    groups = [stored([1, 2], None, [5, 6], 1, group_idx=group) for group in (0, 1)]
    known = table(*groups, removed(2, group_idx=1))
    assert known.held(chain(5, 6)) == 1
    tell(known, removed(2, group_idx=0), removed(1, group_idx=0), removed(1, group_idx=1))
    assert len(known) == 0


def test_tiers_are_kept_apart():
    """A block on the CPU is held there, behind what the GPU holds; losing the GPU's copy leaves the CPU's."""
    known = table(stored([1, 2], None, [5, 6], 1), stored([2, 3], 1, [6, 7], 1, medium="CPU"), removed(2))
    assert [known.held(chain(5, 6, 7), tier) for tier in (0, 1)] == [1, 3]
    tell(known, removed(3, medium="CPU"))
    assert [known.held(chain(5, 6, 7), tier) for tier in (0, 1)] == [1, 2]


def test_what_cannot_be_placed_is_counted():
    """Placeholders, other block sizes, unknown parents and unknown kinds change nothing and are counted."""
    known = table(stored([1, 2], None, [5, 6, 7, 8], 2))
    before = published(known)
    tell(known, stored([3], None, [], 0, medium="CPU"), stored([4], None, [5], 1), stored([5], 99, [5, 6], 2))
    tell(known, {"type": "BlockStored"} | stored([6, 7], None, [5, 6], 2))
    counters = known.counters
    assert (counters.placeholders, counters.mismatches, counters.unknown_parents) == (1, 3, 1)
    assert (published(known), len(known)) == (before, 2)


def test_clearing_forgets_everything():
    """After a reset nothing is held, and what was published is told to be gone."""
    known = table(stored([1, 2], None, [5, 6], 1), stored([3], 2, [7], 1, medium="CPU"))
    known.changes()
    tell(known, cleared(), stored([8], None, [9], 1))
    assert [known.held(one) for one in (chain(5, 6), chain(9))] == [0, 1]
    told = {change.tier: len(change) for change in known.changes()}
    assert (told, len(known)) == ({0: 3, 1: 4}, 1)


def test_no_more_than_the_bound_is_remembered():
    """An engine that never removes anything does not fill the router's memory."""
    known = EngineHashes(MODEL, 10)
    for start in range(0, 10_000, 100):
        names = list(range(start, start + 100))
        tell(known, stored(names, names[0] - 1 if start else None, names, 1))
    assert len(known) <= BLOCKS_PER_CAPACITY * 10 + BLOCKS_SPARE
    assert known.counters.refused + len(known) + known.counters.unknown_parents == 10_000


class Plain:
    """What events say, worked out from scratch each time, as sets of prefixes."""

    def __init__(self) -> None:
        self.names: dict[int, tuple[int | None, tuple, bool]] = {}  # parent, content, opaque
        self.copies: Counter = Counter()  # (name, group, tier)
        self.columns: set[tuple[int, int]] = set()

    def known(self) -> set[int]:
        found = {name for (name, _, _), count in self.copies.items() if count}
        for name in list(found):
            while (name := self.names[name][0]) is not None:
                found.add(name)
        return found

    def store(self, names, parent, ids, salt, media, group, tier):
        if parent is not None and parent not in self.known():
            return
        content = (salt,) if parent is None else self.names[parent][1]
        for number, (name, token) in enumerate(zip(names, ids, strict=True)):
            content = (*content, token)
            if name not in self.known():
                self.names[name] = (parent, content, number == media)
            self.columns.add((group, tier))
            self.copies[name, group, tier] += 1
            parent = name

    def remove(self, name, group, tier):
        if self.copies[name, group, tier]:
            self.copies[name, group, tier] -= 1

    def clear(self):
        self.__init__()

    def holds(self, name, tier):
        groups = [group for group, where in self.columns if where == tier]
        return bool(groups) and all(self.copies[name, group, tier] for group in groups)

    def reached(self, tier) -> set[tuple]:
        def reaches(name, tier) -> bool:
            parent, _, is_opaque = self.names[name]
            if is_opaque or tier < 0:
                return False
            if reaches(name, tier - 1):
                return True
            return self.holds(name, tier) and (parent is None or reaches(parent, tier))

        return {self.names[name][1] for name in self.known() if reaches(name, tier)}


TIER_NAMES = ("GPU", "CPU", "STORAGE")
steps = st.lists(
    st.one_of(
        st.tuples(
            st.just("store"),
            st.lists(st.integers(0, 2), max_size=3),  # the tokens above
            st.lists(st.integers(0, 2), min_size=1, max_size=3),  # the tokens stored
            st.sampled_from([None, "s"]),
            st.none() | st.integers(0, 2),  # which of them has media
            st.integers(0, 1),  # group
            st.sampled_from([0, 0, 0, 1, 2]),  # tier
        ),
        st.tuples(
            st.just("remove"),
            st.lists(st.integers(0, 2), min_size=1, max_size=5),
            st.sampled_from([None, "s"]),
            st.integers(0, 1),
            st.sampled_from([0, 0, 0, 1, 2]),
        ),
        st.just(("clear",)),
        st.just(("pack",)),
    ),
    max_size=30,
)


def name_of(ids, salt) -> int:
    return hash((tuple(ids), salt)) & (2**64 - 1)


def told_as(model: dict[int, set[int]], known: EngineHashes) -> None:
    """Keep what a store would have that is only told the changes."""
    for change in known.changes():
        model[change.tier] -= set(memoryview(change.gone).cast("Q"))
        model[change.tier] |= set(memoryview(change.added).cast("Q"))


@settings(max_examples=300, deadline=None)
@given(steps)
def test_any_history(history):
    """Whatever is stored, removed and cleared, in any order, group and tier: what is reached is what a plain reading
    says, what was told adds up to it, and a snapshot in between changes nothing."""
    known, plain, media = EngineHashes(MODEL, 1000), Plain(), {}
    store: dict[int, set[int]] = {tier: set() for tier in range(3)}
    for step in history:
        if step[0] == "store":
            _, above, ids, salt, item, group, tier = step
            names = [name_of([*above, *ids[: n + 1]], salt) for n in range(len(ids))]
            parent = name_of(above, salt) if above else None
            item = media.setdefault(names[0], item)  # the same prompt has its media at the same place
            if any(media.setdefault((name, "at"), (n == item)) != (n == item) for n, name in enumerate(names)):
                continue
            keys: list = [[salt] if salt and not above and n == 0 else [] for n in range(len(ids))]
            if item is not None and item < len(ids):
                keys[item] = [*keys[item], ["img", 0]]
            extra = [one or None for one in keys]
            tell(known, stored(names, parent, ids, 1, extra_keys=extra, group_idx=group, medium=TIER_NAMES[tier]))
            plain.store(names, parent, ids, salt, item, group, tier)
        elif step[0] == "remove":
            _, ids, salt, group, tier = step
            tell(known, removed(name_of(ids, salt), group_idx=group, medium=TIER_NAMES[tier]))
            plain.remove(name_of(ids, salt), group, tier)
        elif step[0] == "clear":
            tell(known, cleared())
            plain.clear()
        else:
            told_as(store, known)
            known = EngineHashes.unpack(known.pack(), MODEL, 1000)
        for tier in (tier for tier in range(3) if known.tree.open >> tier & 1):
            expected = set()
            for salt, *ids in plain.reached(tier):
                *_, expected_cell = cells_of(chain(*ids, salt=salt))
                expected.add(expected_cell)
            assert published(known, tier) == expected
        assert set(known._blocks) == plain.known()
    told_as(store, known)
    assert [store[tier] for tier in range(3)] == [published(known, tier) for tier in range(3)]
    everything = {change.tier: set(memoryview(change.added).cast("Q")) for change in known.everything()}
    assert everything == {tier: published(known, tier) for tier in range(3) if published(known, tier)}


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_gives_the_same_table(release):
    """Plain prompts, a shared prefix, a duplicate, evictions and a reset give one index in every release's form."""
    history = [
        [stored([1, 2, 3], None, [5, 6, 7], 1), stored([4], 2, [8], 1)],
        [stored([3], 2, [7], 1), removed(3), removed(4)],
        [stored([9], None, [4], 1), stored([10, 11], 3, [1, 2], 1)],
    ]
    known, newest = EngineHashes(MODEL, 100), EngineHashes(MODEL, 100)
    for events in history:
        tell(known, *events, release=release)
        tell(newest, *events)
        assert published(known) == published(newest)
    assert known.held(chain(5, 6, 7, 1, 2)) == 5


def test_a_real_engine_full_of_evictions():
    """A recorded pool of 40 blocks: what is left can be hit, what was removed cannot, and nothing was unclear."""
    recording = recorded("evicted")
    known = EngineHashes("tiny", 39)
    for payload in payloads(recording):
        known.apply(decode_batch(payload))
    counters = known.counters
    assert (counters.unknown_parents, counters.unknown_removals, counters.mismatches) == (0, 0, 0)
    assert len(published(known)) == counters.stored - counters.removed == len(known)
    last = chain_of(tokens_of(recording["prompts"][-1]), 32, root_of("tiny"))
    assert known.held(last) == len(last) // 8


@pytest.mark.parametrize(("name", "blocks"), [("hybrid", 10), ("adapters", 6), ("salted", 2), ("byte_hashes", 3)])
def test_a_real_engine(name, blocks):
    """Recorded events of a hybrid model, of adapters, a salt, and with hashes in bytes: every full block is known."""
    known = EngineHashes("tiny", 100)
    for payload in payloads(recorded(name)):
        known.apply(decode_batch(payload))
    assert (known.counters.stored, known.counters.unknown_parents, known.counters.mismatches) == (blocks, 0, 0)


def test_suspects_are_confirmed_by_what_is_stored_below_them():
    """After lost events a block is suspect until the engine builds on it; its first removal takes it."""
    known = table(stored([1, 2], None, [5, 6], 1), stored([2], 1, [6], 1), stored([3, 4], None, [7, 8], 1))
    known.suspect()
    assert (known.suspects, known.held(chain(5, 6)), known.held(chain(7, 8))) == (4, 2, 2)
    tell(known, stored([9], 2, [1], 1), removed(4))
    assert (known.suspects, known.counters.confirmed, known.held(chain(7, 8))) == (1, 2, 1)
    tell(known, removed(2))
    assert known.held(chain(5, 6)) == 1


def test_suspects_are_judged_by_deliveries():
    """What a request found is there; what it did not find is gone, and all suspects below it."""
    known = table(stored([1, 2, 3, 4], None, [5, 6, 7, 8], 1), stored([9], 3, [1], 1))
    known.suspect()
    known.delivered(chain(5, 6, 7, 8), 2)
    assert (known.held(chain(5, 6, 7, 8)), known.suspects, len(known), known.counters.dropped) == (2, 0, 2, 3)
    tell(known, stored([3], 2, [7], 1))
    assert known.held(chain(5, 6, 7, 8)) == 3


def test_suspects_do_not_outlive_many_deliveries():
    """What neither an event nor a delivery has confirmed is given up in the end."""
    known = table(stored([1, 2], None, [5, 6], 1))
    known.suspect()
    for _ in range(SUSPECT_DELIVERIES - 1):
        known.delivered(chain(3), 0)
    assert known.held(chain(5, 6)) == 2
    known.delivered(chain(3), 0)
    assert (known.held(chain(5, 6)), known.suspects, len(known)) == (0, 0, 0)


def test_suspects_make_room():
    """A cache does not hold more than it can: the oldest suspects go, tail first, and never what is certain."""
    known = table(stored([1, 2, 3], None, [5, 6, 7], 1), stored([4, 5], None, [8, 9], 1), capacity=6)
    known.suspect()
    tell(known, stored([6, 7, 8], None, [1, 2, 3], 1))
    assert [known.held(one) for one in (chain(5, 6, 7), chain(8, 9), chain(1, 2, 3))] == [1, 2, 3]
    tell(known, stored([9, 10, 11], 8, [4, 5, 6], 1))
    assert [known.held(one) for one in (chain(5, 6, 7), chain(8, 9), chain(1, 2, 3, 4, 5, 6))] == [0, 0, 6]


def test_deliveries_teach_what_no_event_told():
    """After lost events, what a request found is held until deliveries no longer vouch for it; the engine's own events
    about the same blocks count beside it."""
    known = table(stored([1], None, [5], 1))
    known.delivered(chain(5, 6, 7), 3)
    assert known.held(chain(5, 6, 7)) == 1  # every event was heard, so there is nothing to learn
    known.suspect()
    known.delivered(chain(5, 6, 7), 3)
    assert (known.held(chain(5, 6, 7)), known.counters.learnt) == (3, 3)
    tell(known, removed(1), stored([1, 2], None, [5, 6], 1), removed(2))
    known = EngineHashes.unpack(known.pack(), MODEL, 1000)
    for _ in range(SUSPECT_DELIVERIES - 1):
        known.delivered(chain(3), 0)
    known.delivered(chain(5, 6, 7, 8), 3)
    known.delivered(chain(3), 0)
    assert known.held(chain(5, 6, 7)) == 3
    known.delivered(chain(5, 6, 7), 1)
    assert (known.held(chain(5, 6, 7)), len(known)) == (1, 1)
    for _ in range(SUSPECT_DELIVERIES):
        known.delivered(chain(3), 0)
    assert (known.held(chain(5, 6, 7)), len(known), known.suspects) == (1, 1, 0)


def test_a_snapshot_keeps_suspects_and_copies():
    """What a successor loads behaves as the table that was packed."""
    known = table(stored([1, b"x" * 32], None, [5, 6], 1), stored([b"x" * 32], 1, [6], 1))
    again = EngineHashes.unpack(known.pack(), MODEL, 1000)
    tell(again, removed(b"x" * 32))
    assert (again.held(chain(5, 6)), again.block_size) == (2, 1)
    again.suspect()
    third = EngineHashes.unpack(again.pack(), MODEL, 1000)
    third.delivered(chain(5, 6), 1)
    assert (third.held(chain(5, 6)), third.suspects) == (1, 0)
    assert hashes_of(chain(5))[0] in map(third.tree.own, third._blocks.values())


REPORT = {"session_id": REPORT_SESSION}


def test_what_is_told_again_is_not_another_copy():
    """What our own request had the engine tell again counts where it was not known, and is no copy more where it was;
    what others store is one, and so is what our request itself stores below it."""
    known = table(stored([1, 2], None, [5, 6], 1))
    tell(known, stored([1, 2, 3], None, [5, 6, 7], 1, **REPORT), stored([4], 3, [8], 1, **REPORT))
    tell(known, stored([4], 3, [8], 1, **REPORT), stored([3], 2, [7], 1, session_id="a client's"))
    assert known.held(chain(5, 6, 7, 8)) == 4
    tell(known, removed(4))
    assert known.held(chain(5, 6, 7, 8)) == 4
    tell(known, removed(4), removed(3))
    assert known.held(chain(5, 6, 7, 8)) == 3
    tell(known, removed(3), removed(2))
    assert known.held(chain(5, 6, 7, 8)) == 1


def test_a_report_gives_learnt_blocks_their_names():
    """What deliveries taught after lost events is certain once the engine names it, and goes when it says so; what was
    learnt beyond stays as doubtful as it was."""
    known = table(stored([1], None, [5], 1), stored([9], None, [3], 1))
    known.suspect()
    known.delivered(chain(5, 6, 7, 8), 4)
    known.delivered(chain(5, 6, 1), 3)
    tell(known, stored([1, 2, 3, 4], None, [5, 6, 7, 8], 1, **REPORT))
    assert [known.held(one) for one in (chain(5, 6, 7, 8), chain(5, 6, 1), chain(3))] == [4, 3, 1]
    assert {known._names[block] for block in known._suspects if block not in known._learnt} == {9}
    assert known.suspects == 4  # 3, and 5, 6, 1 as they were learnt
    tell(known, removed(2))
    assert [known.held(one) for one in (chain(5, 6, 7, 8), chain(5, 6, 1))] == [1, 1]


def test_sparse_groups_report_what_they_have_not():
    """vLLM has a window's group report all of a hit's blocks, those that it let go as well: that says nothing."""
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 2}
    known = table(stored([1, 2], None, [5, 6], 1), stored([2], 1, [6], 1, **window))
    tell(known, stored([1, 2], None, [5, 6], 1, **window, **REPORT))
    assert [known.reusable(one) for one in (chain(5), chain(5, 6))] == [0, 2]


def test_a_block_size_that_does_not_fit_is_not_learnt():
    """The first event says one size and has tokens of another: the size is learnt of the next that is sound."""
    known = EngineHashes(MODEL, 100)
    known.apply(decode_batch(encoded([stored([5], None, [1, 2, 3], 999)])))
    known.apply(decode_batch(encoded([stored([6], None, [1] * 16, 16)])))
    assert (known.block_size, len(known)) == (16, 1)


def test_a_window_wider_than_any_cache():
    """A window that no run of blocks can fill ends no feed."""
    known = EngineHashes(MODEL, 100)
    full = stored([1], None, [1] * 16, 16, group_idx=0, kv_cache_spec_kind="full_attention")
    wide = {"kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 1 << 40}
    known.apply(decode_batch(encoded([full, stored([1], None, [1] * 16, 16, group_idx=1, **wide)])))
    known.changes()
    assert len(EngineHashes.unpack(known.pack(), MODEL, 100)) == 1


def test_a_group_with_blocks_of_thousands_of_ours():
    """However many blocks of ours go into one of a sparse group's, its ends are worked out without recursion."""
    known, count = EngineHashes(MODEL, 10_000), 2_500
    full = stored(
        list(range(1, count + 1)), None, [1] * 16 * count, 16, group_idx=0, kv_cache_spec_kind="full_attention"
    )
    state = stored([1_200], None, [1] * 16 * 1_200, 16 * 1_200, group_idx=1, kv_cache_spec_kind="mamba")
    known.apply(decode_batch(encoded([full, state])))
    known.changes()
    assert len(known) == count
