"""Copies in CPU memory: what stays, what makes room, and what is announced."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.offload import OffloadTier
from kvroute.kv.pool import Removed, Stored
from tests.kv.notation import chain, written


def told(tier: OffloadTier) -> str:
    events = tier.drain()
    assert {event.medium for event in events} <= {"CPU"}
    return written(events)


def test_every_block_is_announced_by_itself_and_once():
    """A block that is here already is not copied again."""
    tier = OffloadTier(8)
    tier.keep(chain("a3"), 0, 2)
    tier.keep(chain("a3"), 0, 3)
    assert told(tier) == "S[a0]<-None S[a1]<-a0 S[a2]<-a1"


def test_the_tail_of_what_was_used_longest_ago_makes_room():
    """Of the chain that waited longest the end goes first, so that its beginning still serves."""
    tier = OffloadTier(5)
    tier.keep(chain("a3"), 0, 3)
    tier.keep(chain("b2"), 0, 2)
    told(tier)
    tier.keep(chain("c2"), 0, 2)
    assert told(tier) == "R[a2] R[a1] S[c0]<-None S[c1]<-c0"
    assert tier.match(chain("a3"), 0, 3) == 1


def test_what_is_used_stays_longer():
    """Using a chain makes others older."""
    tier = OffloadTier(4)
    tier.keep(chain("a2"), 0, 2)
    tier.keep(chain("b2"), 0, 2)
    tier.use(chain("a2"), 0, 2)
    tier.keep(chain("c1"), 0, 1)
    assert (tier.match(chain("a2"), 0, 2), tier.match(chain("b2"), 0, 2)) == (2, 1)


def test_a_match_continues_without_a_gap():
    """It begins where the engine's own cache ends, and ends at the first block that is missing or at the limit."""
    tier = OffloadTier(8)
    tier.keep(chain("a6"), 2, 4)
    assert [tier.match(chain("a6"), first, limit) for first, limit in ((0, 6), (2, 6), (3, 6), (2, 3), (4, 6))] == [
        0, 2, 1, 1, 0,
    ]  # fmt: skip


def test_what_never_fits_is_not_kept():
    """A chain that is larger than all the memory does not empty it."""
    tier = OffloadTier(2)
    tier.keep(chain("a1"), 0, 1)
    tier.keep(chain("b3"), 0, 3)
    assert (told(tier), repr(tier)) == ("S[a0]<-None", "<OffloadTier 1 of 2 blocks>")


def test_a_reset_forgets_everything():
    """After it nothing is found."""
    tier = OffloadTier(2)
    tier.keep(chain("a1"), 0, 1)
    tier.reset()
    assert (tier.match(chain("a1"), 0, 1), len(tier)) == (0, 0)


def test_no_memory_is_no_tier():
    """The error names the argument."""
    with pytest.raises(ValueError, match="num_blocks"):
        OffloadTier(0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 5), st.integers(0, 6)), max_size=40))
def test_events_tell_what_is_here(steps):
    """A listener that follows the events knows exactly the blocks that are here, never more than fit."""
    tier, known = OffloadTier(5), set()
    for name, first, count in steps:
        tier.keep(chain(f"{name}12"), first, first + count)
        for event in tier.drain():
            if isinstance(event, Stored):
                assert known.isdisjoint(event.hashes)
                known |= set(event.hashes)
            elif isinstance(event, Removed):
                known.remove(event.hash)
        assert len(known) == len(tier) <= 5
