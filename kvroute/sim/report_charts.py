"""The pictures of a comparison as plain values; `report_page` writes them as SVG, a plotting library as PNG."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvroute.sim.report import METRICS, Figure, Report
from kvroute.sim.simulation_figures import Outcomes

Points = tuple[tuple[float, float], ...]


class Bar(Struct, frozen=True):
    """One policy's figure, with the least and the most over seeds."""

    name: str
    figure: Figure


class Bars(Struct, frozen=True):
    """A figure of every policy, side by side."""

    title: str
    unit: str
    bars: tuple[Bar, ...]
    is_better_low: bool


class Curve(Struct, frozen=True):
    """A line of one policy."""

    name: str
    points: Points


class Curves(Struct, frozen=True):
    """Lines over one pair of axes."""

    title: str
    x_name: str
    y_name: str
    curves: tuple[Curve, ...]
    is_log: bool = False  # the x axis


BARS = ("reached_share", "ttft_mean_s", "ttft_p99_s", "output_tokens_s", "end_to_end_mean_s", "preemptions")


def bars_of(report: Report) -> list[Bars]:
    """Return the figures that tell most; one that is zero for everyone is left out."""
    found = []
    for one in METRICS:
        bars = tuple(Bar(row.policy, row.figures[one.key]) for row in report.rows)
        if one.key in BARS and any(bar.figure.most > 0 for bar in bars):
            found.append(Bars(one.label, one.unit, bars, bool(one.is_better_low)))
    return found


def curves_of(report: Report) -> list[Curves]:
    """Return distributions and courses over time, each of a policy's first seed; what is zero for all is left out."""

    def lines(name: str) -> tuple[Curve, ...]:
        return tuple(Curve(row.policy, thinned(course(row.runs[0], name))) for row in report.rows)

    charts = [
        Curves("Time to first token", "seconds", "share of requests", lines("ttft_curve"), is_log=True),
        Curves("Output", "seconds", "tokens a second", lines("throughput")),
        Curves("Waiting", "seconds", "requests in queues and held", lines("waiting")),
        Curves("Caches in use", "seconds", "share held by running requests", lines("cache_used")),
    ]
    return [
        chart for chart in charts if any(len(one.points) > 1 and any(y for _, y in one.points) for one in chart.curves)
    ]


def course(run: Outcomes, name: str) -> Points:
    """Return one of a run's lines."""
    points: Points = getattr(run, name)
    return points


def thinned(points: Points, most: int = 120) -> Points:
    """Return at most so many points: neighbours become their mean."""
    step = -(-len(points) // most)
    if step <= 1:
        return points
    groups: list[Sequence[tuple[float, float]]] = [points[n : n + step] for n in range(0, len(points), step)]
    return tuple((sum(x for x, _ in group) / len(group), sum(y for _, y in group) / len(group)) for group in groups)
