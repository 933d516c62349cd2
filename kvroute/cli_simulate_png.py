"""The pictures of a simulation as PNG. Needs matplotlib, which only those install who want it (kvroute[plots])."""

from __future__ import annotations

from io import BytesIO
from textwrap import fill
from typing import Any

from kvroute.errors import ConfigError
from kvroute.sim.report import Report, number
from kvroute.sim.report_charts import Bars, Curves, bars_of, curves_of
from kvroute.sim.report_page import colour

INCHES = (13.0, 3.1)  # of a row of two pictures
DPI = 130
LINE = 190  # letters


def png_of(report: Report) -> bytes:
    """Draw the pictures of a report, two in a row.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--png needs matplotlib: pip install 'kvroute[plots]'") from None
    charts: list[Bars | Curves] = [*bars_of(report), *curves_of(report)]
    rows = -(-len(charts) // 2)
    figure = Figure(figsize=(INCHES[0], INCHES[1] * rows + 0.8), dpi=DPI, layout="constrained")
    figure.suptitle(report.title, x=0.01, ha="left", fontsize=14, fontweight="bold")
    axes = figure.subplots(rows, 2, squeeze=False).flatten()
    for place, chart in zip(axes, charts, strict=False):
        if isinstance(chart, Bars):
            _draw_bars(place, chart)
        else:
            _draw_curves(place, chart)
    for place in axes[len(charts) :]:
        place.set_visible(False)
    facts = "; ".join(f"{name}: {fact}" for name, fact in report.facts.items())
    figure.supxlabel(fill(facts, LINE), fontsize=8, color="#666", x=0.01, ha="left")
    data = BytesIO()
    figure.savefig(data, format="png", metadata={"Software": "kvroute"})
    return data.getvalue()


def _draw_bars(axes: Any, chart: Bars) -> None:
    means = [bar.figure.mean for bar in chart.bars]
    spread = [
        [bar.figure.mean - bar.figure.least for bar in chart.bars],
        [bar.figure.most - bar.figure.mean for bar in chart.bars],
    ]
    names = [bar.name for bar in chart.bars]
    drawn = axes.barh(
        names, means, color=[colour(n) for n in range(len(names))], xerr=spread, ecolor="#333", height=0.7
    )
    axes.bar_label(drawn, [number(mean, chart.unit) for mean in means], padding=5, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.18)
    axes.set_title(f"{chart.title}, {'less' if chart.is_better_low else 'more'} is better", loc="left", fontsize=10)
    _tidy(axes)


def _draw_curves(axes: Any, chart: Curves) -> None:
    for place, curve in enumerate(chart.curves):
        points = [(x, y) for x, y in curve.points if not chart.is_log or x > 0]
        axes.plot(*zip(*points, strict=True), color=colour(place), label=curve.name, linewidth=1.6)
    if chart.is_log:
        axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel(chart.x_name, fontsize=8)
    axes.set_title(f"{chart.title}: {chart.y_name}", loc="left", fontsize=10)
    axes.legend(fontsize=7, frameon=False)
    axes.grid(color="#e5e5e5")
    _tidy(axes)


def _tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=8)
    axes.set_axisbelow(True)
