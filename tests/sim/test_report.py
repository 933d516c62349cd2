"""Comparisons of policies."""

from __future__ import annotations

import pytest

from kvroute.sim.report import METRICS, Figure, best_of, number, of_run, plain, shown, words
from kvroute.sim.workload_profiles import generated
from tests.sim.fleets import play
from tests.sim.reports import compared, single

BY_KEY = {one.key: one for one in METRICS}


def test_figures_are_means_over_seeds_with_their_extremes():
    """Each figure lies between those of the seeds it is made of."""
    for row in compared().rows:
        for one in METRICS:
            values = [one.value(run) for run in row.runs]
            assert row.figures[one.key] == Figure(pytest.approx(sum(values) / 2), min(values), max(values))


def test_the_best_is_the_least_or_the_most():
    """What is better depends on the figure; where all are equal nobody is best."""
    report = compared()
    assert best_of(report, BY_KEY["reached_share"]) == {"lmetric"}
    assert best_of(report, BY_KEY["ttft_mean_s"]) == {"lmetric"}
    assert best_of(report, BY_KEY["preemptions"]) == set()
    assert best_of(report, BY_KEY["reachable_share"]) == set()
    assert best_of(single(), BY_KEY["ttft_mean_s"]) == set()


def test_figures_that_say_nothing_are_not_shown():
    """Nobody was held here; where every request is alone, there are no conversations."""
    keys = {one.key for one in shown(compared())}
    assert ("held_mean_s" in keys, "conversation_mean_s" in keys) == (False, True)
    assert "conversation_mean_s" not in {one.key for one in shown(single())}


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.12345, "share", "0.123"),
        (0.0123, "s", "12.3 ms"),
        (0.042, "s", "42.0 ms"),
        (0.99999, "s", "1,000 ms"),
        (4.5678, "s", "4.57 s"),
        (1234.5, "s", "1,234.5 s"),
        (1234567, "tokens", "1,234,567"),
        (1.5, "x", "1.50"),
        (2.5, "", "2.5"),
        (0, "", "0"),
    ],
)
def test_values_are_written_with_the_digits_that_matter(value, unit, text):
    """Seconds become milliseconds where they are short; counts have no decimals."""
    assert number(value, unit) == text


def test_a_spread_is_shown_where_seeds_differ():
    """Half the distance of the extremes stands behind the mean."""
    assert words(Figure(2.0, 1.0, 3.0), "x") == "2.00 ± 1.00"
    assert words(Figure(2.0, 1.975, 2.025), "s") == "2.00 s ± 25 ms"
    assert words(Figure(2.0, 2.0, 2.0), "x") == "2.00"


def test_plain_values_hold_every_run():
    """JSON has the summary and each seed's figures, and says what is ignored."""
    data = plain(compared())
    assert data["ignored"] == ("the network",)
    policy = data["policies"]["random"]
    assert [run["seed"] for run in policy["runs"]] == [1, 2]
    assert policy["summary"]["ttft_mean_s"]["min"] == min(run["ttft_mean_s"] for run in policy["runs"])


def test_stages_are_told_one_by_one():
    """Where a workload has some, each has its own figures; where not, there is nothing of them."""
    run = play(generated("shared-prefix", {"stages": "2x5,8x5", "groups": "3", "output": "20"}, 16, 1), 2)
    stages = of_run(run)["stages"]
    assert [stage["requests"] for stage in stages] == [10, 40]
    assert stages[0]["ttft_p90_s"] > 0
    assert stages[1]["output_tokens_s"] == pytest.approx(40 * 20 / stages[1]["seconds"])
    assert "stages" not in of_run(single().rows[0].runs[0])
