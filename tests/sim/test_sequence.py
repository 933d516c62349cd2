"""A sequence's arithmetic while it decodes, and the queues."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.sim.sequence import ByArrival, ByPriority, Phase, Sequence
from kvroute.sim.values import RequestId, SimRequest
from tests.kv.notation import chain


def sequence(prompt: int = 6, output: int = 9, blocks: int = 20, arrival: int = 0, priority: int = 0) -> Sequence:
    return Sequence(SimRequest(RequestId(f"q{arrival}"), chain(f"a{blocks}"), prompt, output, priority), arrival)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 50), st.integers(1, 9), st.integers(0, 30))
def test_a_plan_names_the_next_step_that_does_more_than_count(prompt, output, step, size, blocks):
    """Between two planned steps no block is begun or filled, and the last step is always planned."""
    one = sequence(prompt, output, blocks)
    one.computed = prompt
    one.decode_from(step)
    steps = {step + count: prompt + count for count in range(1, output)}  # step -> tokens computed after it
    wanted = [
        at
        for at, end in steps.items()
        if at == one.last or end % size == 1 % size or (end % size == 0 and end // size <= blocks)
    ]
    planned, at = [], step
    while at < one.last:
        at = one.plan(at, size)
        planned.append(at)
    assert planned == wanted


def test_a_single_token_ends_with_its_prefill():
    """An answer of one token comes with the step that computes the prompt's end."""
    one = sequence(output=1)
    one.computed = 6
    one.decode_from(4)
    assert (one.phase, one.last, one.takes_part_in(4), one.takes_part_in(5)) == (Phase.ENDING, 4, True, False)


def test_a_pause_moves_everything_by_a_step():
    """A step that leaves a sequence out produces nothing for it, and its last token comes a step later."""
    one = sequence(prompt=6, output=5)
    one.computed = 6
    one.decode_from(1)
    assert (one.last, [one.produced_after(step) for step in (1, 2, 9)]) == (5, [1, 2, 5])
    one.pause()
    assert (one.last, [one.produced_after(step) for step in (2, 3, 9)]) == (6, [1, 2, 5])


def test_who_was_preempted_waits_in_front():
    """First come, first served, except for those that were running already."""
    queue, (a, b, c) = ByArrival(), (sequence(arrival=number) for number in range(3))
    for one in (b, c):
        queue.add(one)
    queue.put_back(a)
    assert (list(queue), queue.head(), len(queue)) == ([a, b, c], a, 3)
    queue.remove(b)
    assert list(queue) == [a, c]


def test_priorities_come_before_arrivals():
    """The smallest value first; among equals, and for those that are put back, the order of arrival."""
    values = (3, 1, 1, 0)
    queue, all_of_them = ByPriority(), [sequence(arrival=n, priority=value) for n, value in enumerate(values)]
    for one in all_of_them[1:]:
        queue.add(one)
    queue.put_back(all_of_them[0])
    assert [one.arrival for one in queue] == [3, 1, 2, 0]
    queue.remove(all_of_them[1])
    assert ([one.arrival for one in queue], queue.head().arrival, len(queue)) == ([3, 2, 0], 3, 3)


def test_the_repr_shows_phase_and_blocks():
    """A sequence says where it is in its life."""
    assert repr(sequence()) == "<Sequence q0 waiting, 0 blocks>"
