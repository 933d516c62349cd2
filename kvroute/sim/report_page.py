"""A comparison as one self-contained HTML page: a table and pictures, no script, nothing loaded from elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, floor, log10

from kvroute.sim.report import Report, best_of, number, shown, words
from kvroute.sim.report_charts import Bars, Curves, bars_of, curves_of
from kvroute.sizing.plot import escape, short

COLOURS = (
    "#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#0f9ba8", "#c2562d", "#5b6770", "#a83279", "#6b8e23",
    "#444b9b", "#8c6d5a",
)  # fmt: skip
WIDTH, LEFT, RIGHT = 560, 64, 12
BAR, LABEL = 24, 130
TOP, HEIGHT = 26, 260
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
h1 { font-size: 1.5rem; margin-bottom: .3rem } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem }
.scroll { overflow-x: auto } table { border-collapse: collapse; font-variant-numeric: tabular-nums }
th, td { padding: .22rem .8rem; border-bottom: 1px solid #e2e2e2; text-align: right; white-space: nowrap }
th:first-child, td:first-child { text-align: left; font-weight: 400; position: sticky; left: 0; background: #fff }
td.best { font-weight: 700; color: #14663c } dl { display: grid; grid-template-columns: max-content 1fr; gap: 0 1rem }
dt { color: #666 } dd { margin: 0 } .note { color: #666 } .grid { display: grid; gap: 1.2rem }
@media (min-width: 60rem) { .grid { grid-template-columns: 1fr 1fr } }
svg { width: 100%; font: 12px system-ui, sans-serif } svg text { fill: currentColor } svg .rule { stroke: #e5e5e5 }
svg .title { font-weight: 600; font-size: 13px } svg .spread { stroke: currentColor; stroke-width: 1.5 }
.key { display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; margin: .4rem 0 } .key i { display: inline-block;
width: .8em; height: .8em; border-radius: 2px; margin-right: .4em }
@media (prefers-color-scheme: dark) {
  body, th:first-child, td:first-child { background: #16181c; color: #ddd } th, td { border-color: #333 }
  svg .rule { stroke: #333 } td.best { color: #7ddba3 } dt, .note { color: #999 }
}
"""


def page_of(report: Report) -> str:
    """Write the page."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in report.facts.items())
    seeds = max((len(row.runs) for row in report.rows), default=0)
    spread = f" Means over {seeds} seeds, ± half the distance between the extremes." if seeds > 1 else ""
    names = [row.policy for row in report.rows]
    body = [
        f"<h1>{escape(report.title)}</h1>",
        f"<dl>{facts}</dl>",
        f'<h2>Figures</h2><p class="note">The best of each row is bold.{spread}</p>',
        f'<div class="scroll">{_table(report)}</div>',
        f'<h2>Side by side</h2><div class="grid">{"".join(map(bars_svg, bars_of(report)))}</div>',
        f"<h2>Distribution and course</h2>{_key(names)}",
        f'<div class="grid">{"".join(map(curves_svg, curves_of(report)))}</div>',
        "<h2>Not in this result</h2><ul>",
        *(f"<li>{escape(note)}</li>" for note in report.notes),
        "</ul>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{escape(report.title)}</title>'
        f"<style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def colour(number: int) -> str:
    """Return the colour of the n-th policy."""
    return COLOURS[number % len(COLOURS)]


def _table(report: Report) -> str:
    head = "".join(f"<th>{escape(row.policy)}</th>" for row in report.rows)
    lines = []
    for one in shown(report):
        best = best_of(report, one)
        cells = (
            f"<td{' class=best' if row.policy in best else ''}>{escape(words(row.figures[one.key], one.unit))}</td>"
            for row in report.rows
        )
        lines.append(f"<tr><td>{escape(one.label)}</td>{''.join(cells)}</tr>")
    return f"<table><tr><th></th>{head}</tr>{''.join(lines)}</table>"


def _key(names: Iterable[str]) -> str:
    marks = (f'<span><i style="background:{colour(n)}"></i>{escape(name)}</span>' for n, name in enumerate(names))
    return f'<div class="key">{"".join(marks)}</div>'


def bars_svg(chart: Bars) -> str:
    """Draw one figure of all policies."""
    most = max(bar.figure.most for bar in chart.bars) or 1.0
    room = WIDTH - LABEL - 130
    height = TOP + BAR * len(chart.bars) + 8
    better = "less is better" if chart.is_better_low else "more is better"
    parts = [_open(chart.title, height), f'<text x="0" y="15" class="title">{escape(chart.title)}, {better}</text>']
    for place, bar in enumerate(chart.bars):
        y, figure = TOP + BAR * place, bar.figure
        long = room * figure.mean / most
        parts.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{escape(bar.name)}</text>')
        parts.append(f'<rect x="{LABEL}" y="{y + 3}" width="{long:.1f}" height="{BAR - 7}" fill="{colour(place)}"/>')
        low, high = (LABEL + room * value / most for value in (figure.least, figure.most))
        if high - low > 1:
            middle = y + 3 + (BAR - 7) / 2
            parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{middle}" y2="{middle}" class="spread"/>')
        text = escape(number(figure.mean, chart.unit))
        parts.append(f'<text x="{max(LABEL + long, high) + 6:.1f}" y="{y + 15}">{text}</text>')
    return "".join([*parts, "</svg>"])


def curves_svg(chart: Curves) -> str:
    """Draw lines over a pair of axes."""
    points = [point for curve in chart.curves for point in curve.points if not chart.is_log or point[0] > 0]
    xs = [log10(x) if chart.is_log else x for x, _ in points]
    low, high = min(xs), max(xs)
    most = max(max(y for _, y in points), 1e-9)

    def at(x: float, y: float) -> tuple[float, float]:
        along = (x - low) / (high - low or 1.0)
        return LEFT + along * (WIDTH - LEFT - RIGHT), HEIGHT - 40 - y / most * (HEIGHT - 40 - TOP)

    parts = [
        _open(chart.title, HEIGHT),
        f'<text x="{LEFT}" y="15" class="title">{escape(chart.title)}: {escape(chart.y_name)}</text>',
        f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 4}" text-anchor="middle">{escape(chart.x_name)}</text>',
    ]
    for value in ticks(0.0, most):
        _, y = at(low, value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="rule"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(value) if value else 0}</text>')
    marks = [float(n) for n in range(ceil(low), floor(high) + 1)] if chart.is_log else ticks(low, high)
    for value in marks:
        x, _ = at(value, 0.0)
        text = short(10**value) if chart.is_log else short(value) if value else "0"
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - 40}" class="rule"/>')
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 24}" text-anchor="middle">{text}</text>')
    for place, curve in enumerate(chart.curves):
        seen = [at(log10(x) if chart.is_log else x, y) for x, y in curve.points if not chart.is_log or x > 0]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in seen)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour(place)}" stroke-width="1.8"/>')
    return "".join([*parts, "</svg>"])


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Return about `count` round values between two."""
    if high <= low:
        return [low]
    step = 10.0 ** floor(log10((high - low) / count))
    for factor in (1, 2, 5, 10):
        if (high - low) / (step * factor) <= count:
            step *= factor
            break
    return [step * n for n in range(ceil(low / step), floor(high / step) + 1)]


def _open(title: str, height: float) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}" '
        'xmlns="http://www.w3.org/2000/svg">'
    )
