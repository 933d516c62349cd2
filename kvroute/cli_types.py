"""What the command line's figures may be."""

from __future__ import annotations

from math import isfinite
from typing import Any

import click


class Finite(click.FloatRange):
    """A number in a range. `nan`, which lies outside no range, and infinities are none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Read a number.

        Raises:
            click.BadParameter: it is none, or not in the range.
        """
        found = float(super().convert(value, param, ctx))
        if not isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


SECONDS = Finite(0, 1e6)
FRACTION = Finite(0, 1)
RATE = Finite(1e-6, 1e6)  # of something a second, or times as many
