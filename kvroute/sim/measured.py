"""Step times from a measured table instead of a model's shape: calibration with one's own engines.

A table has rows of two kinds, each the mean time of one step:

    decode    `count` sequences with `context` tokens of history each get one token each
    prefill   `count` tokens of one prompt are computed after `context` tokens that are cached

Between rows times are interpolated, first over context, then over count; beyond the table the last slope goes on, but
never downwards. A step that does both takes the prefill's time, with the decoding tokens counted in, and what the
decoding sequences' history adds to a decode step: weights are read and kernels launched once for both.

Times are whole femtoseconds, as in `engine`, and many decode steps at once are summed in closed form. Reading files is
not done here.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, Literal

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sim.engine import FS, StepWork

LINES_KEPT = 4096  # interpolated lines that are remembered, one for each number of sequences or tokens
COUNT_LIMIT = 100_000_000
SECONDS_LIMIT = 3600.0
COLUMNS = ("kind", "count", "context", "seconds")


class Row(Struct, frozen=True):
    """One measurement."""

    kind: Literal["decode", "prefill"]
    count: int  # sequences, or tokens of the prompt
    context: int  # tokens of history of each sequence, or tokens cached before
    seconds: float


def rows_of(table: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Read the rows of a table: mappings with the columns kind, count, context and seconds, as text or numbers.

    Raises:
        ConfigError: a column is missing or wrong; the message names row and column.
    """
    return [_row(number, values) for number, values in enumerate(table, 1)]


def _row(number: int, values: Mapping[str, Any]) -> Row:
    for column in COLUMNS:
        if values.get(column) in (None, ""):
            raise ConfigError(f"row {number}: {column} is missing; the columns are {', '.join(COLUMNS)}")
    kind = values["kind"]
    if kind not in ("decode", "prefill"):
        raise ConfigError(f"row {number}: kind must be decode or prefill, not {kind!r}")
    count = _number(number, "count", values["count"], 1, COUNT_LIMIT)
    context = _number(number, "context", values["context"], 0, COUNT_LIMIT)
    return Row(kind, int(count), int(context), _number(number, "seconds", values["seconds"], 1e-9, SECONDS_LIMIT))


def _number(row: int, column: str, value: Any, least: float, most: float) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = float("nan")
    if not least <= number <= most or (column != "seconds" and number != int(number)):
        raise ConfigError(f"row {row}: {column} must be a number from {least:g} to {most:g}, not {value!r}")
    return number


class _Line:
    """A function of whole numbers made of straight pieces; beyond its ends the outer pieces go on."""

    def __init__(self, knots: list[tuple[int, int]]) -> None:
        self.starts = [at for at, _ in knots]
        self._values = [value for _, value in knots]
        slopes = [(after - before) // (end - start) for (start, before), (end, after) in pairwise(knots)]
        self._slopes = [*slopes, max(0, slopes[-1]) if slopes else 0]

    def value(self, at: int) -> int:
        """Return its value at one place, at least 1."""
        return self.sum(at, 1, 1)

    def sum(self, at: int, step: int, count: int) -> int:
        """Add up its values, each at least 1, at `count` places `step` apart, the first of them `at`."""
        total = 0
        while count:
            piece = max(0, bisect_right(self.starts, at) - 1)
            is_last = piece == len(self.starts) - 1
            here = count if is_last else min(count, -(-(self.starts[piece + 1] - at) // step))
            slope = self._slopes[piece]
            first = self._values[piece] + slope * (at - self.starts[piece])
            total += _sum_at_least_one(first, slope * step, here)
            at += here * step
            count -= here
        return total


def _sum_at_least_one(first: int, growth: int, count: int) -> int:
    last = first + growth * (count - 1)
    if first < 1 and last < 1:
        return count
    if first < 1:
        return _sum_at_least_one(last, -growth, count)
    if last < 1:
        good = (first - 1) // -growth + 1
        return _sum_at_least_one(first, growth, good) + count - good
    return count * first + growth * (count * (count - 1) // 2)


class _Grid:
    """Times over count and context."""

    def __init__(self, rows: list[Row]) -> None:
        found: dict[int, dict[int, int]] = {}
        for row in rows:
            found.setdefault(row.count, {})[row.context] = round(row.seconds * FS)
        self._counts = sorted(found)
        self._by_count = {count: _Line(sorted(values.items())) for count, values in found.items()}
        self._lines: dict[int, _Line] = {}

    def line(self, count: int) -> _Line:
        """Return the times for a count, over context."""
        line = self._lines.get(count)
        if line is None:
            if len(self._lines) >= LINES_KEPT:
                self._lines.clear()
            line = self._lines[count] = self._between(count)
        return line

    def _between(self, count: int) -> _Line:
        counts = self._counts
        if count in self._by_count or len(counts) == 1 or count < counts[0]:
            return self._by_count[count if count in self._by_count else counts[0]]
        upper = min(bisect_right(counts, count), len(counts) - 1)
        low, high = counts[upper - 1], counts[upper]
        lower, higher = self._by_count[low], self._by_count[high]
        knots = []
        for context in sorted({*lower.starts, *higher.starts}):
            before, after = lower.value(context), higher.value(context)
            grown = (after - before) * (count - low) // (high - low)
            knots.append((context, before + (grown if count < high else max(grown, after - before))))
        return _Line(knots)


class MeasuredTime:
    """Step times of an engine that was measured.

    Raises:
        ConfigError: there is no row of one of the two kinds.
    """

    def __init__(self, rows: Iterable[Row]) -> None:
        given = list(rows)
        for kind in ("decode", "prefill"):
            if not any(row.kind == kind for row in given):
                raise ConfigError(f"the table has no row of kind {kind}: measure at least one")
        self._decode = _Grid([row for row in given if row.kind == "decode"])
        self._prefill = _Grid([row for row in given if row.kind == "prefill"])
        self._totals: dict[int, _Line] = {}

    def step_fs(self, work: StepWork) -> int:
        """Return the duration of a step that computes `work`; an empty one takes no time."""
        decodes, kv_tokens = work.decodes, work.kv_tokens
        if not work.prefills:
            return self.decode_fs(1, decodes, kv_tokens) if decodes else 0
        tokens = sum(count for _, count in work.prefills)
        pairs = sum(start * count + count * (count - 1) // 2 for start, count in work.prefills)
        start = max(0, (pairs - tokens * (tokens - 1) // 2) // tokens)  # one chunk with as many pairs to attend to
        total = self._prefill.line(tokens + decodes).value(start)
        if decodes:
            total += max(0, self.decode_fs(1, decodes, kv_tokens) - self.decode_fs(1, decodes, 0))
        return total

    def decode_fs(self, steps: int, sequences: int, kv_tokens: int) -> int:
        """Return the duration of `steps` steps that only decode, in closed form."""
        return self._total(sequences).sum(kv_tokens, sequences, steps)

    def _total(self, sequences: int) -> _Line:
        """Return the time of a decode step over the history of all its sequences together."""
        line = self._totals.get(sequences)
        if line is None:
            if len(self._totals) >= LINES_KEPT:
                self._totals.clear()
            each = self._decode.line(sequences)
            line = _Line([(sequences * context, each.value(context)) for context in each.starts])
            self._totals[sequences] = line
        return line
