"""A step under way."""

from __future__ import annotations

from kvroute.sim.engine import StepWork
from kvroute.sim.flight import Flight
from kvroute.sim.sequence import Sequence
from kvroute.sim.values import RequestId, SimRequest
from tests.kv.notation import chain


def decoding(step: int) -> Sequence:
    sequence = Sequence(SimRequest(RequestId("q"), chain("a9"), 6, 5), 0)
    sequence.computed = 6
    sequence.decode_from(step)
    return sequence


def test_it_says_what_it_computes():
    """Chunks with what lies before them, and decoding sequences with their history."""
    flight = Flight(3)
    assert (flight.work, flight.sequences, flight.is_idle) == (StepWork(), 0, True)
    flight.chunks[decoding(3)] = (16, 8)
    flight.decodes, flight.kv_tokens = 2, 90
    assert flight.work == StepWork(prefills=((16, 8),), decodes=2, kv_tokens=90)
    assert (flight.sequences, flight.is_idle) == (3, False)


def test_it_serves_those_that_decode_in_it_and_are_not_left_out():
    """A token comes from the step of the last known token on, up to the last one."""
    one = decoding(3)
    assert [Flight(step).serves(one) for step in (2, 3, 7, 8)] == [False, True, True, False]
    flight = Flight(5)
    flight.left_out.add(one)
    assert not flight.serves(one)
