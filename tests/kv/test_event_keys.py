"""What a stored block's keys say about the chain that it is in."""

from __future__ import annotations

import pytest

from kvroute.kv.event_keys import is_sparse, read_keys, tier_of
from kvroute.kv.events import decode_batch
from tests.kv.encoded import encoded, stored


def event(keys, parent=None, count=2, **rest):
    (one,) = decode_batch(encoded([stored(list(range(count)), parent, [0] * count, 1, extra_keys=keys, **rest)])).events
    return one


@pytest.mark.parametrize(
    ("keys", "parent", "lora", "expected"),
    [
        (None, None, None, (None, 2)),
        ([None, None], None, None, (None, 2)),
        ([["s"], None], None, None, ("s", 2)),
        ([["s"], None], 7, None, (None, 0)),
        ([["a", "s"], ["a"]], None, "a", ("s", 2)),
        ([["a", "a"], ["a"]], None, "a", ("a", 2)),
        ([["a"], ["a"]], None, None, ("a", 1)),
        ([["s"], [["img", 3]]], None, None, ("s", 1)),
        ([[["img", -3], "s"], None], None, None, (None, 0)),
        ([["s", "digest"], None], None, None, (None, 0)),
        ([None, ["digest"]], None, None, (None, 1)),
        ([None], None, None, (None, 0)),
        ([{"odd": 1}, None], None, None, (None, 0)),
    ],
)
def test_keys(keys, parent, lora, expected):
    """An adapter's name is taken off, a salt is one word in a chain's first block, and anything else ends the chain."""
    assert read_keys(event(keys, parent, lora_name=lora)) == expected


def test_tiers_and_kinds():
    """Media that have no name here are the slowest tier; kinds that have none promise nothing."""
    assert [tier_of(medium) for medium in (None, "GPU", "gpu", "CPU", "STORAGE", "FS")] == [0, 0, 0, 1, 2, 2]
    kinds = (None, "full_attention", "mla_attention", "sink_full_attention", "mamba", "new")
    assert [is_sparse(event(None, kv_cache_spec_kind=kind)) for kind in kinds] == [False] * 4 + [True] * 2
