"""What one owner of a stream packs, the next one finds as it was, or not at all."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.engine_snapshot import VERSION, read
from kvroute.kv.events import decode_batch
from kvroute.kv.hit_ends import ENDS
from tests.kv.encoded import cleared, encoded, removed, stored


def packed() -> bytes:
    """Return a snapshot of a hybrid's two blocks, one of them in a group with a window."""
    known = EngineHashes("m", 1000)
    window = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
    known.apply(decode_batch(encoded([stored([1, b"x"], None, [5, 6], 1), stored([1], None, [5], 1, **window)])))
    return known.pack()


def test_parts_arrive_as_they_were():
    """Names, parents, copies and sparse groups are those that were packed."""
    found = read(packed())
    assert (found.hashes, found.parent_numbers().tolist()) == ([1, b"x"], [-1, 0])
    assert [(group, tier, counts.tolist()) for group, tier, counts in found.copies()] == [(0, 0, [1, 1])]
    assert found.sparse_copies == [(1, 3, 1, {1: 1})]


@pytest.mark.parametrize("data", [b"", b"\x93\x01\x02\x03", packed()[:-3]])
def test_what_is_no_snapshot_is_refused(data):
    """Other bytes than a snapshot's are an error that says so."""
    with pytest.raises(ValueError, match=r".+"):
        EngineHashes.unpack(data, "m", 10)


@pytest.mark.parametrize(
    ("at", "value", "why"),
    [
        (0, VERSION - 1, "version"),
        (4, b"", "parts of"),
        (5, b"\xff\xff\xff\xff\x01\x00\x00\x00", "without its parent"),
        (7, [(0, 9, b"\x01\x00\x01\x00")], "tier"),
        (3, [1, 1], "two blocks"),
        (6, [2], "no block's"),
        (8, [7], "no block's"),
        (9, [-1], "no block's"),
    ],
)
def test_parts_that_do_not_fit_are_refused(at, value, why):
    """Another version, parts of other lengths, a block before its parent and a tier that is none are named."""
    parts = msgspec.msgpack.decode(packed())
    parts[at] = value
    with pytest.raises(ValueError, match=why):
        read(msgspec.msgpack.encode(parts))


WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}
ids = st.lists(st.integers(0, 1), min_size=1, max_size=5)
words = st.tuples(st.sampled_from(["store", "store", "keep", "keep", "remove", "drop", "clear"]), ids)


def said(what: str, ids: list[int]) -> dict[str, Any]:
    name = [int("1" + "".join(map(str, ids[: n + 1]))) for n in range(len(ids))]
    place = name[-1:], (name[-2] if len(name) > 1 else None), ids[-1:], 1
    return {
        "store": stored(*place),
        "keep": stored(*place, **WINDOW),
        "remove": removed(name[-1]),
        "drop": removed(name[-1], group_idx=1),
        "clear": cleared(),
    }[what]


def tell(store: dict[int, set[int]], known: EngineHashes) -> None:
    for change in known.changes():
        store[change.tier] -= set(memoryview(change.gone).cast("Q"))
        store[change.tier] |= set(memoryview(change.added).cast("Q"))


@settings(max_examples=300, deadline=None)
@given(st.lists(words, max_size=30), st.integers(0, 30), st.integers(0, 30))
def test_a_successor_arrives_where_the_stream_is(history, packed_at, died_at):
    """However far the last owner had told beyond its snapshot, batch by batch: when the next one has told what it heard
    from there on, all at once, the store has what its table has."""
    first, store = EngineHashes("m", 1000), {tier: set() for tier in range(4)}
    batches = [decode_batch(encoded([said(*one)])) for one in [("keep", [0]), *history]]
    packed_at = min(packed_at, len(batches))
    for batch in batches[:packed_at]:
        first.apply(batch)
    tell(store, first)
    second = EngineHashes.unpack(first.pack(), "m", 1000)
    for batch in batches[packed_at:died_at]:
        first.apply(batch)
        tell(store, first)
    for batch in batches[packed_at:]:
        second.apply(batch)
    tell(store, second)
    assert [store[tier] for tier in range(3)] == [set(cells) for cells in second.tree.cells]
    assert store[ENDS] == set(second.ends.cells)
