"""Pictures as values."""

from __future__ import annotations

import pytest

from kvroute.sim.report_charts import bars_of, curves_of, thinned
from tests.sim.reports import compared


def test_every_policy_is_in_every_picture():
    """Bars and lines come in the order of the policies."""
    report = compared()
    assert {tuple(bar.name for bar in chart.bars) for chart in bars_of(report)} == {("lmetric", "random")}
    assert {tuple(curve.name for curve in chart.curves) for chart in curves_of(report)} == {("lmetric", "random")}


def test_what_is_zero_for_everyone_has_no_picture():
    """Nothing was preempted, so no bars say so."""
    assert "preemptions" not in {chart.title for chart in bars_of(compared())}


def test_long_lines_are_thinned_to_means():
    """Neighbours become one point; the mean stays."""
    points = tuple((float(n), float(n % 7)) for n in range(1000))
    few = thinned(points, 100)
    assert (len(few), thinned(few, 100)) == (100, few)
    assert sum(y for _, y in few) / 100 == pytest.approx(sum(y for _, y in points) / 1000)
