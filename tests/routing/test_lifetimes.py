"""What runs together, and what of it is held at one time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.lifetimes import Life, ends_of, life_of, peak_with

lives = st.lists(st.builds(Life, st.integers(0, 1_000), st.integers(1, 3), st.integers(0, 500)), max_size=12)


def held_at(lives: list[Life], steps: float) -> float:
    return sum(life.held_tokens + life.sequences * steps for life in lives if life.steps >= steps)


@given(lives, st.builds(Life, st.integers(0, 1_000), st.integers(1, 3), st.integers(0, 500)))
def test_the_peak_is_the_most_of_all_moments(others: list[Life], new: Life):
    """Whatever runs: looked at step by step there is never more, and once as much."""
    everybody = [*others, new]
    assert peak_with(ends_of(others), new) == max(held_at(everybody, step) for step in range(501))


def test_who_began_together_ends_together():
    """Then the peak is the sum of what each holds at its end."""
    one = Life(100.0, 1, 50.0)
    assert peak_with(ends_of([one] * 9), one) == 10 * 150.0


def test_what_is_still_to_come_of_an_answer():
    """Of one whose length is known the rest, and as much more as lengths differ."""
    assert life_of(1_100.0, 100.0, 1, 60.0, 0.0) == Life(1_060.0, 1, 40.0)
    assert life_of(1_100.0, 100.0, 1, 60.0, 1.0) == Life(1_060.0, 1, 140.0)
    assert life_of(1_100.0, 100.0, 2, 10.0, 0.5) == Life(1_020.0, 2, 65.0)
    assert life_of(1_100.0, 100.0, 1, 900.0, 0.0) == Life(1_100.0, 1, 0.0)
