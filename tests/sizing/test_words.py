"""Figures as people read them."""

import pytest

from kvroute.sizing.words import bytes_words, count, gb, room, seconds, three_digits, tokens


@pytest.mark.parametrize(
    ("value", "words"),
    [(131_072, "131,072 (128 KiB)"), (2_621_440, "2,621,440 (2.5 MiB)"), (70_272, "70,272 (68.62 KiB)"), (12, "12")],
)
def test_bytes(value, words):
    """Exact, with the binary unit beside."""
    assert bytes_words(value) == words


def test_other_units():
    """Decimal GB, thousands separated, times in the unit that suits."""
    assert (gb(671_088_640_000), tokens(396_272)) == ("671.1 GB", "396,272")
    assert [gb(value) for value in (67_700_000, 4_096, 12, -2_000_000_000)] == ["67.7 MB", "4.1 kB", "12 B", "-2.0 GB"]
    assert [count(value) for value in (8_030_261_248, 466_900, 12)] == ["8.0 B", "466.9 K", "12"]
    assert [seconds(value) for value in (2.5, 0.01907, 3e-5, 1e-9)] == [
        "2.50 s",
        "19.1 ms",
        "30.0 us",
        "0.00100 us",
    ]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (4.3, "4.30"),
        (42, "42.0"),
        (999.6, "1,000"),
        (12_345, "12,345"),
        (100, "100"),
        (0, "0"),
        (-0.0512, "-0.0512"),
        (0.000123456, "0.000123"),
    ],
)
def test_three_digits(value, words):
    """Figures in a column have as many digits as each other, and never an exponent."""
    assert three_digits(value) == words


def test_room():
    """Weights that do not fit leave nothing, not a negative size."""
    assert [room(value) for value in (57_500_000_000, 0, -599_300_000_000)] == ["57.5 GB", "nothing", "nothing"]
