"""The decoding sequences together: counts, sums, and who is due when."""

from __future__ import annotations

from kvroute.sim.decoding import Decoding
from kvroute.sim.sequence import Sequence
from kvroute.sim.values import RequestId, SimRequest
from tests.kv.notation import chain


def entered(decoding: Decoding, number: int, computed: int, step: int, output: int = 100) -> Sequence:
    sequence = Sequence(SimRequest(RequestId(f"q{number}"), chain("a50"), computed, output), number)
    sequence.number, sequence.computed = number, computed
    sequence.decode_from(step)
    decoding.enter(sequence, step)
    return sequence


def test_tokens_are_counted_without_looking_at_sequences():
    """Every step adds a token for each, and who leaves takes its tokens along."""
    decoding = Decoding(4)
    first, _ = entered(decoding, 1, 10, 5), entered(decoding, 2, 7, 6)
    assert (decoding.count, decoding.kv_tokens(6), decoding.kv_tokens(8)) == (2, 11 + 7, 13 + 9)
    decoding.leave(first)
    assert (decoding.count, decoding.kv_tokens(8), repr(decoding)) == (1, 9, "<Decoding 1 sequences>")


def test_those_that_are_due_come_in_the_order_of_admission():
    """A block of four is full after 8 tokens and a new one begins at the ninth; others are left alone."""
    decoding = Decoding(4)
    second, first, later = entered(decoding, 2, 7, 0), entered(decoding, 1, 7, 0), entered(decoding, 3, 5, 0)
    assert decoding.next_due() == 1
    assert decoding.take_due(1) == [first, second]
    decoding.wait(first, 1)
    decoding.leave(second)
    assert (decoding.take_due(2), decoding.take_due(3)) == ([first], [later])


def test_who_is_left_out_is_due_a_step_later():
    """What was noted before is void."""
    decoding = Decoding(4)
    one = entered(decoding, 1, 6, 0)
    decoding.pause(one, 1)
    assert (decoding.next_due(), decoding.take_due(2), decoding.take_due(3)) == (3, [], [one])
    assert decoding.kv_tokens(3) == 8
