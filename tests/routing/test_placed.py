"""The record of placements that routers without cache events keep."""

from __future__ import annotations

from kvroute.routing.placed import LlmdPrefixes, PlacedPrefixes
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


def test_llmd_compares_the_beginning_alone():
    """Of 200 tokens the first 64 are kept and compared: what differs behind them is the same to it."""
    placed = LlmdPrefixes(limit_tokens=1e6, match_tokens=64)
    placed.add(R0, ask(200, chain=chain(12)), 0.0)
    other = ask(200, chain=chain(12)[: 4 * 8] + chain(8, root=9))
    assert placed.hit_tokens(R0, other, 1.0) == placed.looked_at(other) == 64
    assert placed.looked_at(ask(50, chain=chain(3))) == 50


def test_llmd_forgets_the_head_first_and_skips_gaps():
    """Of room for eight blocks a new prompt of four leaves the other its tail, which counts if another has the head."""
    placed = LlmdPrefixes(limit_tokens=8 * 16, match_tokens=4096)
    placed.add(R0, ask(96, chain=chain(6)), 0.0)
    placed.add(R0, ask(64, chain=chain(4, root=9)), 1.0)
    assert placed.hit_tokens(R0, ask(96, chain=chain(6)), 2.0) == 0
    placed.add(R1, ask(32, chain=chain(2)), 3.0)
    assert placed.hit_tokens(R0, ask(96, chain=chain(6)), 4.0) == 4 * 16
    assert placed.hit_tokens(R1, ask(96, chain=chain(6)), 4.0) == 2 * 16
