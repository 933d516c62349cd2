"""How much of the pool may be reserved follows from what is lost."""

from __future__ import annotations

import pytest

from kvroute.routing.pressure import CUT, FILL, FILL_MAX, FILL_MIN, GROWTH, Pressure


def returns(pressure: Pressure, found: int, times: int, *, is_idle: bool = True) -> None:
    """Let conversations of 1,000 tokens come back and find some of them."""
    for _ in range(times):
        pressure.learn_return(1_000, found, seats=10, is_idle=is_idle)


def test_lost_caches_shrink_the_set():
    """Where a fifth is lost again and again, the share falls, down to its bound."""
    pressure = Pressure()
    returns(pressure, 800, 13, is_idle=False)
    assert pressure.fill == FILL  # the mean over the last 20 or so is just about to pass a tenth
    assert pressure.lost == pytest.approx(0.2 * (1 - 0.95**13))
    returns(pressure, 800, 1)
    assert pressure.fill == pytest.approx(FILL * CUT)
    returns(pressure, 800, 10)
    assert pressure.fill == pytest.approx(FILL * CUT)  # ten seats: what comes back now may have been lost before
    returns(pressure, 800, 1)
    assert pressure.fill == pytest.approx(FILL * CUT * CUT)
    returns(pressure, 0, 500)
    assert pressure.fill == FILL_MIN


def test_it_grows_only_while_requests_wait_beside_room():
    """Caches that are found are no reason to reserve more where nobody waits, or nothing is free."""
    pressure = Pressure()
    returns(pressure, 1_000, 100, is_idle=False)
    assert pressure.fill == FILL
    returns(pressure, 1_000, 1)
    assert pressure.fill == pytest.approx(FILL * GROWTH)
    returns(pressure, 1_000, 10_000)
    assert pressure.fill == FILL_MAX


def test_turns_that_find_no_room_shrink_it_too():
    """A conversation that lives here and cannot run says that too many do."""
    pressure = Pressure()
    pressure.learn_wait()
    assert FILL_MIN < pressure.fill < FILL
    for _ in range(1_000):
        pressure.learn_wait()
    assert pressure.fill == FILL_MIN


def test_a_first_prompt_says_nothing():
    """Where nothing was kept nothing can be lost."""
    pressure = Pressure()
    pressure.learn_return(0, 0, seats=10, is_idle=True)
    assert (pressure.fill, pressure.lost) == (FILL, 0.0)
