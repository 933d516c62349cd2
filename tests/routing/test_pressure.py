"""How much of the pool may be reserved follows from what is lost."""

from __future__ import annotations

import pytest

from kvroute.routing.pressure import CUT, FILL, FILL_MAX, FILL_MIN, GROWTH, LOST_MAX, Pressure


def returns(pressure: Pressure, found: int, times: int, *, is_idle: bool = True) -> None:
    """Let conversations of 1,000 tokens come back and find some of them."""
    for _ in range(times):
        pressure.learn_return(1_000, found, seats=10, is_idle=is_idle)


def test_lost_caches_shrink_the_set():
    """Where half is lost again and again, the share falls once a round of ten seats, down to its bound."""
    pressure = Pressure()
    while pressure.lost <= LOST_MAX:
        assert pressure.fill == FILL
        returns(pressure, 500, 1, is_idle=False)
    assert pressure.fill == pytest.approx(FILL * CUT)
    returns(pressure, 500, 10)
    assert pressure.fill == pytest.approx(FILL * CUT)  # what comes back now may have been lost before
    returns(pressure, 500, 1)
    assert pressure.fill == pytest.approx(FILL * CUT * CUT)
    returns(pressure, 0, 500)
    assert pressure.fill == FILL_MIN


def test_a_few_that_come_back_late_are_no_pressure():
    """One cache of twenty may be lost without a cut."""
    pressure = Pressure()
    for number in range(400):
        returns(pressure, 0 if number % 20 == 0 else 1_000, 1, is_idle=False)
    assert pressure.fill == FILL
    assert pressure.lost == pytest.approx(0.05, abs=0.02)


def test_it_grows_only_while_requests_wait_beside_room():
    """Caches that are found are no reason to reserve more where nobody waits, or nothing is free."""
    pressure = Pressure()
    returns(pressure, 1_000, 100, is_idle=False)
    assert pressure.fill == FILL
    returns(pressure, 1_000, 1)
    assert pressure.fill == pytest.approx(FILL * GROWTH)
    returns(pressure, 1_000, 10_000)
    assert pressure.fill == FILL_MAX


def test_after_a_cut_it_comes_back_to_where_it_began():
    """While nothing is lost it recovers whether anybody waits or not, and goes no further for nothing."""
    pressure = Pressure()
    returns(pressure, 0, 100, is_idle=False)
    assert pressure.fill < FILL
    returns(pressure, 1_000, 3_000, is_idle=False)
    assert FILL <= pressure.fill < FILL * GROWTH


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
