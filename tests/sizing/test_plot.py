"""Plots are well-formed SVG, whatever is drawn."""

from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sizing.plot import TINY, Line, escape, plot, short

NAME = st.text(st.characters(codec="utf-8", exclude_categories=["C"]))
POINT = st.tuples(st.floats(0, 1e12), st.floats(0, 1e15))


@settings(deadline=None)
@given(st.lists(st.lists(POINT, max_size=9), max_size=4), NAME)
def test_any_lines_give_well_formed_svg(points, name):
    """Every drawing parses as XML and keeps within its frame; nothing to draw is the empty string."""
    drawn = plot(name, "x", "y", [Line(name, tuple(some)) for some in points])
    if not drawn:
        assert not [point for some in points for point in some if min(point) > TINY]
        return
    root = ElementTree.fromstring(drawn)
    for line in root.iter("{http://www.w3.org/2000/svg}polyline"):
        for pair in (line.get("points") or "").split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 680
            assert 0 <= y <= 340


@pytest.mark.parametrize(
    ("value", "words"), [(950, "950"), (8_000, "8k"), (1.5e6, "1.5M"), (0.02, "0.02"), (2e9, "2G")]
)
def test_short_numbers(value, words):
    """Axis labels are short."""
    assert short(value) == words


def test_names_are_escaped():
    """Model names come from files and may hold markup."""
    assert escape("""<b a="x">&'""") == "&lt;b a=&quot;x&quot;&gt;&amp;&#39;"
