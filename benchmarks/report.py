"""How a benchmark ends: one line a figure, and exit status 1 where a bar is missed.

lookup_over_ping            6.21 x (at most 10)
bytes_per_block             17.3 B
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A measured value and, where there is one, its bar."""

    name: str
    value: float
    unit: str
    at_most: float | None = None
    at_least: float | None = None

    @property
    def is_missed(self) -> bool:
        above = self.at_most is not None and self.value > self.at_most
        below = self.at_least is not None and self.value < self.at_least
        return above or below

    def __str__(self) -> str:
        bars = [f"at most {self.at_most:g}"] if self.at_most is not None else []
        bars += [f"at least {self.at_least:g}"] if self.at_least is not None else []
        bar = f" ({', '.join(bars)})" if bars else ""
        return f"{self.name:<40} {self.value:.4g} {self.unit}{bar}{'  MISSED' if self.is_missed else ''}"


def conclude(figures: Iterable[Figure]) -> int:
    """Print the figures and return the exit status."""
    missed = 0
    for figure in figures:
        print(figure, flush=True)
        missed += figure.is_missed
    return 1 if missed else 0
