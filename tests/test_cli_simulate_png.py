"""Pictures as PNG."""

from __future__ import annotations

from io import BytesIO

import pytest
from matplotlib.image import imread

from kvroute.cli_simulate_png import png_of
from tests.sim.reports import compared

pytestmark = pytest.mark.slow  # large files and pictures


def test_a_picture_is_drawn():
    """The PNG can be read again, and is not empty."""
    pixels = imread(BytesIO(png_of(compared())))
    assert pixels.shape[0] > 800
    assert pixels.shape[1] > 1200
    assert pixels.std() > 0.05
