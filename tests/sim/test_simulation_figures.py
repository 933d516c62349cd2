"""Sums, quantiles and series in bounded memory."""

from __future__ import annotations

from random import Random

import pytest

from kvroute.sim.simulation_figures import SERIES_BINS, Figures, Histogram, Series, Spread


def test_quantiles_are_within_a_quarter_of_a_percent():
    """Of a hundred thousand values a few hundred buckets are kept, means and extremes exactly."""
    rng = Random(1)
    values = sorted(rng.lognormvariate(-2, 2) for _ in range(20_000))
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    spread = histogram.spread()
    assert (spread.mean, spread.most) == (pytest.approx(sum(values) / len(values)), values[-1])
    for share, found in ((0.5, spread.p50), (0.9, spread.p90), (0.99, spread.p99)):
        assert found == pytest.approx(values[round(share * len(values)) - 1], rel=0.0026)


def test_a_curve_climbs_to_one():
    """The curve of a distribution never falls, and ends at the largest value."""
    histogram = Histogram()
    for value in (0.0, 1.0, 2.0, 2.0, 8.0):
        histogram.add(value)
    curve = histogram.curve()
    assert curve[0] == (0.0, 0.2)
    assert curve[-1] == (8.0, 1.0)
    assert list(curve) == sorted(curve)


def test_nothing_is_summed_up_to_nothing():
    """Without requests all figures are zero."""
    assert Histogram().spread() == Spread()
    empty = Figures().outcomes("kvroute", 1, [], 0, 0)
    assert (empty.hit_share, empty.reached_share, empty.output_tokens_s, empty.imbalance) == (0, 0, 0, 0)


def test_a_series_keeps_its_sums_when_it_gets_longer():
    """However long a run, there are at most so many bins, and nothing is lost."""
    series = Series()
    for at in range(10_000):
        series.add(float(at), 3.0)
    rates = series.rates()
    assert len(rates) <= SERIES_BINS
    assert sum(rate * series.width_s for _, rate in rates) == pytest.approx(30_000)
    assert {value for _, value in series.means()} == {3.0}


@pytest.mark.parametrize(("since", "until"), [(0.2, 0.7), (0.5, 9.25), (3.0, 3.0), (2.0, 5.0), (0.0, 700.0)])
def test_what_came_over_a_time_is_spread_over_it(since, until):
    """Nothing is lost, and every whole bin in between gets the same."""
    series = Series()
    series.spread(since, until, 100.0)
    rates = series.rates()
    assert sum(rate * series.width_s for _, rate in rates) == pytest.approx(100.0)
    inner = [rate for at, rate in rates if since < at - series.width_s / 2 and at + series.width_s / 2 < until]
    assert inner == pytest.approx([100.0 / (until - since)] * len(inner) if inner else [])


def test_imbalance_compares_the_busiest_with_the_mean():
    """Twice the mean is an imbalance of two."""
    assert Figures().outcomes("random", 1, [40, 0, 20, 20], 0, 0).imbalance == 2.0
