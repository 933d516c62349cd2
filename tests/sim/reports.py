"""A small comparison, for tests of what is made of it."""

from __future__ import annotations

from functools import cache

from kvroute.sim.report import Report, row_of
from tests.sim.fleets import once, play, talk


@cache
def compared() -> Report:
    """Compare two policies over two seeds on a few conversations."""

    def work(seed):
        return iter([talk(n * 0.3, f"c{n} {seed}", 3, 0.2) for n in range(12)])

    rows = [
        row_of(policy, [play(work(seed), 2, policy, seed=seed) for seed in (1, 2)]) for policy in ("lmetric", "random")
    ]
    return Report("talks on <2> replicas", {"cache": "100,000 tokens"}, tuple(rows), ("the network",))


@cache
def single() -> Report:
    """Report one policy on requests that are no conversations."""
    run = play(iter([once(n * 0.1, f"q{n}") for n in range(5)]))
    return Report("requests", {}, (row_of("kvroute", [run]),), ())
