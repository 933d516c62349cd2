"""The scheduler's own bookkeeping; what it decides is held against vLLM's traces in test_replica and tests/vllm."""

from __future__ import annotations

from kvroute.kv.pool import BlockPool
from kvroute.sim.scheduler import Scheduler
from kvroute.sim.sequence import Phase, Sequence
from kvroute.sim.values import Counters, Limits, RequestId, SimRequest
from tests.kv.notation import chain

SIZE = 4


def scheduler(usable: int = 8, **limits: object) -> Scheduler:
    return Scheduler(BlockPool(usable + 1, SIZE), Limits(**limits), Counters())


def queued(to: Scheduler, name: str, prompt: int, output: int) -> Sequence:
    sequence = Sequence(SimRequest(RequestId(name), chain(f"{name}20"), prompt, output), len(to.waiting))
    to.waiting.add(sequence)
    return sequence


def test_who_does_not_fit_is_not_looked_up_again_until_something_changes():
    """A blocked head of the queue costs nothing in steps that only decode, and is tried again when blocks move."""
    one = scheduler()
    queued(one, "a", 17, 9)
    blocked = queued(one, "b", 30, 1)
    for _ in range(2):
        one.deliver(one.schedule())
    assert (blocked.phase, one.idle_steps()) == (Phase.WAITING, 1)
    one.skip(1)
    assert [len(one.schedule().chunks), one.idle_steps()] == [0, 0]
    assert (one.step, one.kv_tokens) == (4, 20)


def test_short_budgets_are_given_out_in_the_order_of_admission():
    """Where not all that run can be served, the first ones are, and the others move on later."""
    one = scheduler(usable=32, max_num_batched_tokens=2)
    sequences = [queued(one, name, 1, 9) for name in "abc"]
    first = one.schedule()
    one.deliver(first)
    second = one.schedule()
    assert [sequence.request.id for sequence in first.chunks] == ["a", "b"]
    assert (second.decodes, second.producers, one.counts(second)) == (2, 2, dict.fromkeys(sequences[:2], 1))


def test_a_sequence_leaves_from_any_phase():
    """Waiting, prefilling and decoding ones give back what they hold, and nobody decodes any more."""
    one = scheduler(usable=32, max_num_batched_tokens=6)
    sequences = [queued(one, name, size, 9) for name, size in (("a", 4), ("b", 9), ("c", 4))]
    flight = one.schedule()
    assert [sequence.phase for sequence in sequences] == [Phase.DECODING, Phase.PREFILLING, Phase.WAITING]
    for sequence in sequences:
        one.drop(sequence, flight, None)
    assert (flight.producers, one.decoding.count, one.pool.free_blocks, len(one.waiting)) == (0, 0, 32, 0)
    assert one.deliver(flight) == ([], [])
