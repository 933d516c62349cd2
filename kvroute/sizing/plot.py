"""Line plots as inline SVG, with logarithmic axes: enough to show how a cache grows, with no library to load."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, floor, log10

from msgspec import Struct

WIDTH, HEIGHT = 680, 340
LEFT, RIGHT, TOP, BOTTOM = 70, 190, 30, 45
COLOURS = ("#1b6ca8", "#d1495b", "#2e8b57", "#8a5fbf", "#b8860b", "#444444")
TINY = 1e-12  # anything smaller is not drawn
DECADES_MAX = 6  # below the largest value; smaller ones are cut off


class Line(Struct, frozen=True):
    """One named curve of (x, y); points that are not positive are left out."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


class Axis(Struct, frozen=True):
    """A logarithmic axis over pixels `start` to `end`."""

    least: float
    most: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Where a value lies."""
        low, high = log10(self.least), log10(self.most)
        return self.start + (log10(value) - low) / (high - low) * (self.end - self.start)

    @property
    def ticks(self) -> list[float]:
        """Powers of ten within the axis; where there are fewer than three, twos and fives too."""
        decades = range(floor(log10(self.least)), ceil(log10(self.most)) + 1)
        few = len([one for one in decades if self.least <= 10**one <= self.most]) < 3
        steps = (1, 2, 5) if few else (1,)
        return [step * 10.0**one for one in decades for step in steps if self.least <= step * 10.0**one <= self.most]


def plot(title: str, x_name: str, y_name: str, lines: Sequence[Line]) -> str:
    """Draw lines over logarithmic axes; the empty string where there is no point to draw."""
    kept = [(line, [(x, y) for x, y in line.points if x > TINY and y > TINY]) for line in lines]
    points = [point for _, some in kept for point in some]
    if not points:
        return ""
    across = _axis([x for x, _ in points], LEFT, WIDTH - RIGHT)
    upward = _axis([y for _, y in points], HEIGHT - BOTTOM, TOP)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}" xmlns="http://www.w3.org/2000/svg">',
        f'<text x="{LEFT}" y="18" class="title">{escape(title)}</text>',
        *_grid(across, upward),
        f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_name)}</text>',
        f'<text transform="translate(14 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_name)}</text>",
    ]
    for number, (line, some) in enumerate(kept):
        parts += _curve(line, some, number, across, upward)
    return "\n".join([*parts, "</svg>"])


def _axis(values: list[float], start: float, end: float) -> Axis:
    most = max(values)
    least = max(min(values), most / 10**DECADES_MAX)
    if least == most:
        least, most = least / 2, most * 2
    return Axis(least, most, start, end)


def _grid(across: Axis, upward: Axis) -> list[str]:
    lines = []
    for tick in across.ticks:
        x = across.at(tick)
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="grid"/>')
        lines.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">{short(tick)}</text>')
    for tick in upward.ticks:
        y = upward.at(tick)
        lines.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        lines.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{short(tick)}</text>')
    return lines


def _curve(line: Line, points: list[tuple[float, float]], number: int, across: Axis, upward: Axis) -> list[str]:
    colour = COLOURS[number % len(COLOURS)]
    seen = [(across.at(x), upward.at(y)) for x, y in points if x >= across.least and y >= upward.least]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in seen)
    dash = ' stroke-dasharray="6 4"' if line.dashed else ""
    y = TOP + 14 + 18 * number
    return [
        f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>',
        f'<line x1="{WIDTH - RIGHT + 10}" x2="{WIDTH - RIGHT + 30}" y1="{y - 4}" y2="{y - 4}" stroke="{colour}" '
        f'stroke-width="2"{dash}/>',
        f'<text x="{WIDTH - RIGHT + 35}" y="{y}">{escape(line.name)}</text>',
    ]


def short(value: float) -> str:
    """Write a number in few characters: 950, 8k, 1.5M, 0.02."""
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:.3g}{letter}"
    return f"{value:.3g}"


def escape(text: str) -> str:
    """Make text safe inside HTML and SVG, attributes included."""
    for mark, entity in (("&", "&amp;"), ("<", "&lt;"), (">", "&gt;"), ('"', "&quot;"), ("'", "&#39;")):
        text = text.replace(mark, entity)
    return text
