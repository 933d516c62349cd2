"""Hits that many requests share need room once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.pinned import FLOOR, MIN_REPORTS, PinnedShare


def learnt(*report: float, times: int = MIN_REPORTS) -> float:
    pinned = PinnedShare()
    for _ in range(times):
        pinned.learn(*report)
    return pinned.value


def test_unshared_hits_count_in_full():
    """Conversations with histories of their own pin all of them."""
    assert learnt(80_000, 5_000, 85_000) == pytest.approx(1.0)


def test_shared_hits_count_by_what_the_engine_holds():
    """Twenty requests on one prompt of 4,000 tokens hold a twentieth of their hits each; the floor is above that."""
    assert learnt(80_000, 5_000, 9_000) == FLOOR
    assert learnt(80_000, 5_000, 45_000) == pytest.approx(0.5)


def test_few_reports_change_nothing():
    """Until enough was seen the safe side holds."""
    assert learnt(80_000, 5_000, 9_000, times=MIN_REPORTS - 1) == 1.0


def test_silent_gauges_change_nothing():
    """Gauges that still stand at zero, and replicas without hits, teach nothing."""
    assert learnt(80_000, 5_000, 0, times=99) == 1.0
    assert learnt(0, 5_000, 9_000, times=99) == 1.0


@given(st.lists(st.tuples(*[st.floats(0, 1e7, allow_subnormal=False)] * 3), max_size=80))
def test_the_share_stays_in_its_bounds(reports: list[tuple[float, float, float]]):
    """Whatever gauges say, a request never counts more than its hits, nor nothing."""
    pinned = PinnedShare()
    for report in reports:
        pinned.learn(*report)
        assert FLOOR <= pinned.value <= 1.0
