"""Copies are counted by group and tier, in no more columns than an engine can sensibly have."""

from __future__ import annotations

from kvroute.kv.block_copies import BlockCopies
from kvroute.kv.event_keys import GROUPS_MAX


def of(length: int, *columns: tuple[int | None, int]) -> BlockCopies:
    copies = BlockCopies()
    copies.lengthen(length)
    for group, tier in columns:
        assert copies.open(group, tier)
    return copies


def test_a_block_is_whole_where_every_group_of_a_tier_has_it():
    """Groups of other tiers have no say, and a tier without groups has nothing."""
    copies = of(2, (0, 0), (1, 0), (0, 1))
    for group, tier in ((0, 0), (1, 0)):
        copies.find(group, tier)[1] = 1
    assert [copies.is_whole(1, tier) for tier in range(3)] == [True, False, False]
    copies.find(1, 0)[1] = 0
    assert (copies.is_whole(1, 0), copies.has_any(1), copies.has_any(0)) == (False, True, False)


def test_the_first_group_says_how_full_the_gpu_is():
    """Of several groups each has its own copy; one that is closed makes room for the next to be the first."""
    copies = of(3, (1, 1), (0, 0), (2, 0))
    copies.load([0, 1, 2], 0, 0, [5, 1, 0])
    copies.load([0, 1, 2], 2, 0, [0, 2, 1])
    assert copies.on_gpu == 6
    copies.flatten()
    assert (copies.on_gpu, copies.find(2, 0).tolist()) == (2, [0, 1, 1])
    copies.drop(1)
    assert copies.on_gpu == 1
    assert copies.close(0) == [0]
    assert (copies.on_gpu, copies.close(7)) == (1, [])


def test_what_was_assumed_is_the_first_group_that_is_named():
    """A delivery may teach before an event has named a group of the GPU; what it taught is of that group."""
    copies = of(2, (3, 1))
    copies.assume()
    copies.teach(1)
    assert not copies.open(4, 0)
    assert (copies.find(4, 0).tolist(), copies.find(None, 0), copies.on_gpu) == ([0, 1], None, 1)
    copies.assume()
    assert copies.open(None, 0)


def test_blocks_on_slower_tiers_are_dropped_apart():
    """The GPU's copy stays."""
    copies = of(1, (0, 0), (0, 1), (None, 2))
    for group, tier in ((0, 0), (0, 1), (None, 2)):
        copies.find(group, tier)[0] = 2
    copies.drop_slower(0)
    assert copies.packed([0]) == [(0, 0, b"\2\0"), (0, 1, b"\0\0"), (None, 2, b"\0\0")]


def test_groups_are_bounded():
    """An engine that names ever new groups fills no memory."""
    copies = of(1, *((group, 0) for group in range(GROUPS_MAX)))
    assert (copies.admits(0, 0), copies.admits(GROUPS_MAX, 0), copies.admits(0, 1)) == (True, False, False)
