"""Counters of the request path."""

from __future__ import annotations

from kvroute.proxy.stats import BOUNDS_S, HandlerStats, Histogram, HoldStats


def test_histogram():
    """Durations are counted under the first bound that is not below them."""
    histogram = Histogram()
    for duration_s in (0.0, 0.005, 0.006, 1e9):
        histogram.observe(duration_s)
    rows = histogram.cumulative()
    assert rows[:2] == [("0.005", 2), ("0.01", 3)]
    assert rows[-2:] == [(str(BOUNDS_S[-1]), 3), ("+Inf", 4)]
    assert histogram.sum_s == 1e9 + 0.011


def test_requests_are_counted_by_outcome_and_status():
    """Every outcome and status has its own count."""
    stats = HandlerStats()
    for outcome, status in (("done", 200), ("done", 200), ("failed", 502)):
        stats.count(outcome, status)
    assert stats.requests == {("done", 200): 2, ("failed", 502): 1}


def test_holds_are_counted_by_what_ended_them():
    """Each hold counts once, the longest is kept, and none is left."""
    holds = HoldStats()
    for outcome, duration_s in (("placed", 2.0), ("expired", 5.0), ("placed", 1.0)):
        holds.begin()
        holds.end(outcome, duration_s)
    holds.begin()
    assert (holds.now, holds.begun, holds.longest_s, holds.time.sum_s) == (1, 4, 5.0, 8.0)
    assert holds.ended == {"placed": 2, "expired": 1, "failed": 0, "left": 0}
