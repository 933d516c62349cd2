"""What one owner of a stream packs, the next one finds as it was, or not at all."""

from __future__ import annotations

import msgspec
import pytest

from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.engine_snapshot import VERSION, read
from kvroute.kv.events import decode_batch
from tests.kv.encoded import encoded, stored


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
