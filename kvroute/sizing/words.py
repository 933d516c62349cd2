"""Figures as people read them. Decimal GB for memory, KiB and MiB for a token, as their sources do."""

from __future__ import annotations

from math import floor, log10


def gb(value: int) -> str:
    """Write bytes as decimal gigabytes, smaller amounts as megabytes or kilobytes."""
    for size, unit in ((10**9, "GB"), (10**6, "MB"), (10**3, "kB")):
        if abs(value) >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,} B"


def count(value: int) -> str:
    """Write a number of parameters."""
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if value >= size:
            return f"{value / size:,.1f} {unit}"
    return f"{value:,}"


def bytes_words(value: int) -> str:
    """Write bytes exactly, with the binary unit beside them."""
    for size, unit in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if value >= size:
            return f"{value:,} ({value / size:,.4g} {unit})"
    return f"{value:,}"


def tokens(value: int) -> str:
    """Write a number of tokens."""
    return f"{value:,}"


def three_digits(value: float) -> str:
    """Write three digits, or all before the point where they are more; zeros at the end are digits, too."""
    places = 2 - floor(log10(abs(value))) if value else 0
    return f"{value:,.{max(0, places)}f}"


def seconds(value: float) -> str:
    """Write a time with three digits, in the unit that suits it."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if value >= size:
            return f"{three_digits(value / size)} {unit}"
    return f"{three_digits(value * 1e6)} us"


def room(value: int) -> str:
    """Write the bytes that are left for a cache."""
    return gb(value) if value > 0 else "nothing"
