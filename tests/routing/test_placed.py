"""The record of placements that routers without cache events keep."""

from __future__ import annotations

from kvroute.routing.placed import PlacedPrefixes
from kvroute.routing.replica import ReplicaId
from tests.routing.builders import ask, chain

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def test_a_longer_prompt_matches_what_was_sent():
    """Whole leading blocks count, on the replica that they went to."""
    placed = PlacedPrefixes()
    placed.add(R0, ask(100, chain=chain(6)), 0.0)
    assert placed.hit_tokens(R0, ask(200, chain=chain(12)), 1.0) == 96
    assert placed.hit_tokens(R1, ask(200, chain=chain(12)), 1.0) == 0
    assert placed.hit_tokens(R0, ask(200, chain=chain(12, root=9)), 1.0) == 0


def test_the_least_recently_used_goes_tail_first():
    """Of eight blocks' room a new prompt of four leaves the other one its head."""
    placed = PlacedPrefixes(limit_tokens=8 * 16)
    placed.add(R0, ask(96, chain=chain(6)), 0.0)
    placed.add(R0, ask(64, chain=chain(4, root=9)), 1.0)
    assert placed.hit_tokens(R0, ask(96, chain=chain(6)), 1.0) == 4 * 16
    assert placed.hit_tokens(R0, ask(64, chain=chain(4, root=9)), 1.0) == 4 * 16


def test_what_was_not_used_for_its_life_is_forgotten():
    """A use renews the blocks that it touches, and no others."""
    placed = PlacedPrefixes(life_s=120.0)
    placed.add(R0, ask(96, chain=chain(6)), 0.0)
    placed.add(R0, ask(64, chain=chain(4)), 100.0)
    assert placed.hit_tokens(R0, ask(96, chain=chain(6)), 120.0) == 96
    assert placed.hit_tokens(R0, ask(96, chain=chain(6)), 121.0) == 64
