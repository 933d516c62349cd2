"""How benchmarks end."""

from __future__ import annotations

import pytest

from benchmarks.report import Figure, conclude


@pytest.mark.parametrize(
    ("figure", "line", "status"),
    [
        (Figure("cpu", 12.0, "us"), "cpu 12 us", 0),
        (Figure("ratio", 1.6, "x", at_most=1.6), "ratio 1.6 x (at most 1.6)", 0),
        (Figure("ratio", 1.61, "x", at_most=1.6), "ratio 1.61 x (at most 1.6) MISSED", 1),
        (Figure("share", 0.96, "", at_least=0.97), "share 0.96 (at least 0.97) MISSED", 1),
    ],
)
def test_a_figure_says_its_bar_and_a_missed_one_fails(capsys, figure, line, status):
    """A figure is one line, and the status is 1 where any bar is missed."""
    assert conclude([figure]) == status
    assert " ".join(capsys.readouterr().out.split()) == line
