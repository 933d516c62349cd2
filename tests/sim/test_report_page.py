"""The page."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from kvroute.routing.router import POLICIES
from kvroute.sim.report_charts import bars_of, curves_of
from kvroute.sim.report_page import COLOURS, bars_svg, colour, curves_svg, page_of, ticks
from tests.sim.reports import compared, single


@pytest.mark.parametrize("report", [compared, single])
def test_a_page_loads_nothing_and_runs_nothing(report):
    """It is one file: no script, no address, whatever the names in it."""
    page = page_of(report())
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="?[^#"]|url\(|@import', page) == []
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}


def test_names_are_escaped_and_notes_shown():
    """A title is text, never markup; what the result ignores is said."""
    page = page_of(compared())
    assert "talks on &lt;2&gt; replicas" in page
    assert "<2>" not in page
    assert "<li>the network</li>" in page


def test_pictures_are_well_formed_and_within_their_frame():
    """Every picture parses, and no coordinate is outside of it."""
    for svg in [*map(bars_svg, bars_of(compared())), *map(curves_svg, curves_of(compared()))]:
        root = ElementTree.fromstring(svg)
        width, height = map(float, root.get("viewBox").split()[2:])
        for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
            for point in line.get("points").split():
                x, y = map(float, point.split(","))
                assert (0 <= x <= width, 0 <= y <= height) == (True, True)


def test_the_best_of_a_row_is_marked():
    """The table says at a glance who was best."""
    assert re.search(r"hits of those reachable</td><td class=best>", page_of(compared()))


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 0.03), (3, 977), (0, 123_456), (5, 5)])
def test_ticks_are_few_and_round(low, high):
    """Axes have between one and seven marks, all within them."""
    found = ticks(low, high)
    assert 1 <= len(found) <= 7
    assert all(low - 1e-9 <= value <= high + 1e-9 for value in found)


def test_all_policies_have_colours_of_their_own():
    """As many as there are rules to compare; then they repeat."""
    assert len(set(COLOURS)) == len(COLOURS) >= len(POLICIES)
    assert colour(len(COLOURS)) == colour(0)
