"""Seats: what conversations will hold, summed by replica."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.conversations import Conversation
from kvroute.routing.habits import HORIZONS, Forecast
from kvroute.routing.replica import ReplicaId
from kvroute.routing.working_set import WorkingSet
from tests.routing.builders import ask, chain

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def conversation(number: int, shared: int = 0) -> Conversation:
    return Conversation(number, ask(1_000, chain=chain(62)), shared, 0.0)


def rising(peak: float) -> Forecast:
    """A run that reaches its peak with the last horizon."""
    return tuple(peak * (place + 1) / len(HORIZONS) for place in range(len(HORIZONS)))


def falling(peak: float) -> Forecast:
    return tuple(reversed(rising(peak)))


def test_peaks_at_the_same_time_add_up_and_others_do_not():
    """Two rising runs of 600 tokens need 1,200; a rising and a falling one never need more than 700."""
    together, apart = WorkingSet(), WorkingSet()
    together.seat(conversation(1), R0, rising(600))
    apart.seat(conversation(1), R0, falling(600))
    assert together.peak_tokens(R0, conversation(2), rising(600)) == pytest.approx(1_200)
    assert apart.peak_tokens(R0, conversation(2), rising(600)) == pytest.approx(700)


def test_a_conversation_is_not_counted_beside_itself():
    """Asking for one that has a seat replaces its forecast."""
    seats, one = WorkingSet(), conversation(1)
    seats.seat(one, R0, rising(800))
    assert seats.peak_tokens(R0, one, rising(900)) == pytest.approx(900)
    assert seats.peak_tokens(R1, one, rising(900)) == pytest.approx(900)


def test_a_shared_prefix_counts_once():
    """Three conversations with one prefix of 160 tokens, and one with another of 320."""
    seats = WorkingSet()
    for number in (1, 2, 3):
        seats.seat(conversation(number, 160), R0, rising(100))
    assert seats.table(R0).shared_tokens == 160
    assert seats.peak_tokens(R0, conversation(4, 320), rising(100)) == pytest.approx(400 + 160 + 320)
    assert seats.peak_tokens(R0, conversation(4, 160), rising(100)) == pytest.approx(400 + 160)
    seats.remove(conversation(1, 160))
    seats.remove(conversation(2, 160))
    assert seats.table(R0).shared_tokens == 160
    seats.remove(conversation(3, 160))
    assert seats.table(R0).shared_tokens == 0


def test_a_seat_ends_when_its_conversation_was_silent_for_too_long():
    """A pause lasts until its time, a next turn renews the seat, and an old time does not end it."""
    seats, one = WorkingSet(), conversation(1)
    seats.seat(one, R0, rising(800))
    seats.advance(1e9)
    assert len(seats) == 1
    seats.pause(one, rising(400), 10.0)
    assert seats.table(R0).sums == pytest.approx(rising(400))
    seats.advance(9.0)
    seats.seat(one, R0, rising(900))
    seats.advance(11.0)
    assert seats.table(R0).sums == pytest.approx(rising(900))
    seats.pause(one, rising(500), 20.0)
    seats.advance(20.0)
    assert len(seats) == 0


def test_a_conversation_that_moves_leaves_its_old_place():
    """A seat is on one replica only."""
    seats, one = WorkingSet(), conversation(1)
    seats.seat(one, R0, rising(800))
    seats.seat(one, R1, rising(900))
    assert seats.table(R0).sums[0] == 0
    assert seats.table(R1).sums == pytest.approx(rising(900))


moves = st.tuples(st.integers(1, 6), st.sampled_from(["seat0", "seat1", "pause", "remove"]), st.integers(0, 10_000))


@given(st.lists(moves, max_size=60))
def test_sums_are_those_of_the_seats(happenings: list[tuple[int, str, int]]):
    """Whatever happens, a replica's sums and shared tokens are those of its seats, counted afresh."""
    seats = WorkingSet()
    known = {number: conversation(number, 160 * (number % 3)) for number in range(1, 7)}
    for number, what, tokens in happenings:
        if what.startswith("seat"):
            seats.seat(known[number], (R0, R1)[int(what[-1])], rising(tokens))
        elif what == "pause":
            seats.pause(known[number], falling(tokens), 5.0)
        else:
            seats.remove(known[number])
        for id in (R0, R1):
            table = seats.table(id)
            whole = [sum(each) for each in zip(*(seat.forecast for seat in table.seats.values()), strict=True)]
            assert table.sums == pytest.approx(whole or [0.0] * len(HORIZONS), abs=1e-3)
            assert table.shared_tokens == sum({160 * (number % 3) for number in table.seats})


def test_a_seat_is_taken_away_as_it_was_counted():
    """That its beginning is shared may turn out while a conversation has a seat: sums stay those of the seats."""
    seats, one, two = WorkingSet(), conversation(1), conversation(2, 160)
    for each in (one, two):
        seats.seat(each, R0, rising(100))
    one.prefix, one.shared_tokens = two.prefix, 160
    seats.seat(one, R0, rising(60))
    assert seats.table(R0).shared_tokens == 160
    seats.remove(two)
    assert seats.table(R0).shared_tokens == 160
    seats.remove(one)
    assert seats.table(R0).shared_tokens == 0
