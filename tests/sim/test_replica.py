"""The simulated engine against traces of vLLM 0.33's own scheduler, and its laws.

A trace has a line for each step: what was scheduled ("!" marks the last token of a sequence), who was preempted, the
share of blocks held after it, prompt tokens looked up / found in the cache so far, and the cache's events.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.pool import BlockPool
from kvroute.sim.engine import FS, StepWork, default_time
from kvroute.sim.replica import Limits, Offload, RequestId, SimReplica, SimRequest
from tests.kv.notation import chain, written

SIZE = 4


def engine(usable: int, *, budget: int, **limits: object) -> SimReplica:
    return SimReplica(BlockPool(usable + 1, SIZE), Limits(max_num_batched_tokens=budget, **limits))


def request(name: str, prompt: int, output: int, *parts: str, priority: int = 0) -> SimRequest:
    """Make a request; without `parts` its blocks are its own, else they name what it shares with others."""
    return SimRequest(RequestId(name), chain(*(parts or (f"{name}20",))), prompt, output, priority)


def line(replica: SimReplica) -> str:
    step, result = replica.step()
    done = dict.fromkeys(result.finished, "!")
    scheduled = " ".join(f"{request}{count}{done.get(request, '')}" for request, count in step.scheduled.items())
    preempted = "".join(step.preempted) or "-"
    counters = replica.counters
    counts = f"{counters.prefix_queries}/{counters.prefix_hits}"
    return f"{scheduled} | {preempted} | {replica.pool.used_fraction:.3f} | {counts} | {written(result.events)}".strip()


def trace(replica: SimReplica, steps: int) -> list[str]:
    return [line(replica) for _ in range(steps)]


def schedule(replica: SimReplica, steps: int) -> list[str]:
    return [text.partition("|")[0].strip() for text in trace(replica, steps)]


def test_chunks_of_a_prompt_are_shared_as_soon_as_they_are_scheduled():
    """A long prompt is computed in chunks of the budget, and those behind it hit what it has stored."""
    replica = engine(32, budget=16)
    replica.add(request("A", 20, 3))
    replica.add(request("B", 20, 3, "A20"))
    replica.add(request("C", 8, 2, "A2", "C20"))
    assert trace(replica, 4) == [
        "A16 | - | 0.125 | 20/0 | S[A0,A1,A2,A3]<-None",
        "A4 B4 C4 | - | 0.219 | 48/20 | S[A4]<-A3 S[A4]<-A3 S[A1]<-A0",
        "A1 B1 C1! | - | 0.250 | 48/20 |",
        "A1! B1! | - | 0.000 | 48/20 |",
    ]
    assert not replica.has_work


def test_a_request_hits_what_was_scheduled_in_the_same_step():
    """Blocks serve from the moment they are taken, not from the end of the step that computes them."""
    replica = engine(32, budget=64)
    replica.add(request("A", 8, 3))
    replica.add(request("B", 13, 3, "A2", "B20"))
    assert line(replica) == "A8 B5 | - | 0.125 | 21/8 | S[A0,A1]<-None S[B2]<-A1"


def test_the_sequence_admitted_last_is_preempted_and_starts_over():
    """Where blocks run out the last one gives way, waits in front, and resumes with what is still cached."""
    replica = engine(8, budget=64)
    for name in "ABC":
        replica.add(request(name, 8, 12))
    assert trace(replica, 9) == [
        "A8 B8 C8 | - | 0.750 | 24/0 | S[A0,A1]<-None S[B0,B1]<-None S[C0,C1]<-None",
        "A1 B1 | C | 0.750 | 24/0 |",
        "A1 B1 | - | 0.750 | 24/0 |",
        "A1 B1 | - | 0.750 | 24/0 |",
        "A1 B1 | - | 0.750 | 24/0 | S[A2]<-A1 S[B2]<-B1",
        "A1 B1 | - | 1.000 | 24/0 | R[C1] R[C0]",
        "A1 B1 | - | 1.000 | 24/0 |",
        "A1 B1 | - | 1.000 | 24/0 |",
        "A1 B1 | - | 1.000 | 24/0 | S[A3]<-A2 S[B3]<-B2",
    ]
    assert line(replica) == "A1 | B | 0.625 | 24/0 | R[B3]"
    assert replica.waiting == ("B", "C")
    assert trace(replica, 3) == [
        "A1 | - | 0.625 | 24/0 |",
        "A1! | - | 0.000 | 24/0 |",
        "B5 C9 | - | 1.000 | 24/0 | R[A3] S[B3]<-B2 R[A2] R[A1] R[A0] S[C0,C1]<-None",
    ]
    assert (replica.counters.resumed_queries, replica.counters.resumed_hits) == (26, 12)
    assert replica.counters.preemptions == 2


def test_a_request_is_admitted_only_where_its_whole_prompt_fits():
    """One that does not fit waits although blocks are free, and those behind it wait too."""
    replica = engine(8, budget=8)
    for name, prompt, output in (("A", 16, 3), ("B", 24, 2), ("C", 4, 2)):
        replica.add(request(name, prompt, output))
    assert schedule(replica, 9) == ["A8", "A8", "A1", "A1!", "B8", "B8", "B8", "B1! C4", "C1!"]


def test_without_the_reservation_a_long_prompt_is_preempted_again_and_again():
    """Admitting on the first chunk alone thrashes: the sequence is preempted as soon as its next chunk comes."""
    replica = engine(8, budget=8, reserve_full_prompt=False)
    for name, prompt, output in (("A", 16, 6), ("B", 24, 2), ("C", 4, 2)):
        replica.add(request(name, prompt, output))
    assert schedule(replica, 10) == ["A8", "A8", "A1 B7", "A1", "A1 B7", "A1", "A1!", "B8", "B8", "B1! C4"]
    assert (replica.counters.resumed_queries, replica.counters.resumed_hits) == (48, 12)


def test_under_priorities_the_least_urgent_gives_way():
    """The smallest value is admitted first, and where blocks run out the largest one is preempted, whoever asked."""
    replica = engine(8, budget=64, policy="priority")
    replica.add(request("A", 8, 12, priority=5))
    replica.add(request("B", 8, 12, priority=1))
    assert line(replica) == "B8 A8 | - | 0.500 | 16/0 | S[B0,B1]<-None S[A0,A1]<-None"
    replica.add(request("C", 8, 12, priority=0))
    assert trace(replica, 8) == [
        "B1 A1 C8 | - | 1.000 | 24/0 | S[C0,C1]<-None",
        "B1 C1 | A | 0.750 | 24/0 |",
        "B1 C1 | - | 0.750 | 24/0 |",
        "B1 C1 | - | 0.750 | 24/0 | S[B2]<-B1",
        "B1 C1 | - | 0.875 | 24/0 | R[A1] S[C2]<-C1",
        "B1 C1 | - | 1.000 | 24/0 | R[A0]",
        "B1 C1 | - | 1.000 | 24/0 |",
        "B1 C1 | - | 1.000 | 24/0 | S[B3]<-B2",
    ]
    assert line(replica) == "| B | 0.500 | 24/0 |"  # it asked for a block itself, and ends the step for those behind it
    assert replica.waiting == ("B", "A")
    assert schedule(replica, 5) == ["C1", "C1", "C1", "C1!", "B5 A10"]


def test_with_asynchronous_scheduling_a_step_is_scheduled_before_the_last_ones_tokens_are_known():
    """A decoded block is named when its token is known, and the block after it is taken a step early."""
    replica = engine(8, budget=4, async_scheduling=True)
    replica.add(request("A", 6, 4))
    assert trace(replica, 4) == [
        "A4 | - | 0.250 | 6/0 | S[A0]<-None",
        "A2 | - | 0.250 | 6/0 |",
        "A1 | - | 0.250 | 6/0 |",
        "A1 | - | 0.375 | 6/0 | S[A1]<-A0",
    ]
    assert line(replica) == "A1! | - | 0.000 | 6/0 |"


def test_a_request_that_comes_after_a_step_scheduled_in_vain_is_served_next():
    """A step scheduled ahead that has nobody to serve is thrown away, and leaves nothing behind."""
    replica = engine(8, budget=8, async_scheduling=True)
    for name in "ABC":
        replica.add(request(name, 4, 1))
        assert line(replica).startswith(f"{name}4! |")
    assert (replica.has_work, replica._names) == (False, {})


def test_a_prompt_that_shares_a_step_is_held_to_the_threshold():
    """Long prefills are cut into small chunks beside others, and not where a request is alone."""
    replica = engine(32, budget=16, max_num_seqs=2, long_prefill_token_threshold=4)
    for name in "ABC":
        replica.add(request(name, 12, 2))
    assert schedule(replica, 6) == ["A4 B4", "A4 B4", "A4 B4", "A1! B1!", "C12", "C1!"]


def test_an_aligned_repeat_computes_one_block_and_one_token_more_computes_one_token():
    """A prompt of exactly k blocks hits k - 1 of them; one token longer, it hits all k."""
    replica = engine(32, budget=64)
    replica.add(request("A", 16, 1))
    assert line(replica) == "A16! | - | 0.000 | 16/0 | S[A0,A1,A2,A3]<-None"
    replica.add(request("B", 16, 1, "A20"))
    assert line(replica) == "B4! | - | 0.000 | 32/12 | S[A3]<-A2"
    replica.add(request("D", 17, 1, "A20"))
    assert line(replica) == "D1! | - | 0.000 | 49/28 |"


def test_the_watermark_keeps_blocks_free_while_others_run():
    """An admission leaves the watermark's blocks free, unless nothing else is scheduled."""
    replica = engine(8, budget=64, watermark=0.25)
    replica.add(request("A", 8, 3))
    assert schedule(replica, 1) == ["A8"]
    replica.add(request("B", 20, 1))
    assert schedule(replica, 3) == ["A1", "A1!", "B20!"]


def test_an_abort_gives_the_blocks_back_at_once():
    """What an aborted request held is there in the next step, blocks without a hash first."""
    replica = engine(8, budget=64)
    replica.add(request("A", 24, 9))
    replica.add(request("B", 20, 1))
    assert schedule(replica, 2) == ["A24", "A1"]
    assert replica.abort(RequestId("A"))
    assert line(replica) == "B20! | - | 0.000 | 44/0 | R[A5] R[A4] R[A3] S[B0,B1,B2,B3,B4]<-None"


def test_a_request_aborted_during_a_step_gets_nothing_of_it():
    """Between the halves of a step a request may leave, and another may come under its id."""
    replica = engine(8, budget=64)
    replica.add(request("A", 4, 2))
    replica.begin()
    assert replica.abort(RequestId("A"))
    replica.add(request("A", 4, 2))
    assert replica.end().produced == ()
    assert replica.waiting == ("A",)


def test_a_waiting_request_may_leave_and_an_unknown_one_is_no_error():
    """Aborting says whether there was anything to abort."""
    replica = engine(8, budget=64)
    replica.add(request("A", 4, 2))
    assert [replica.abort(RequestId("A")), replica.abort(RequestId("A"))] == [True, False]
    assert (replica.has_work, replica.counters.aborted) == (False, 1)


def test_a_prompt_larger_than_the_cache_blocks_the_queue_for_ever():
    """Nothing is scheduled while the first in the queue does not fit, and only an abort helps those behind it."""
    replica = engine(8, budget=64)
    replica.add(request("A", 33, 1))
    replica.add(request("B", 4, 1))
    assert schedule(replica, 2) == ["", ""]
    replica.abort(RequestId("A"))
    assert schedule(replica, 1) == ["B4!"]


def test_blocks_past_the_end_of_the_chain_are_never_cached():
    """What has no hash, as the tokens after an image, is computed every time."""
    replica = engine(8, budget=64)
    for name in "AB":
        replica.add(SimRequest(RequestId(name), chain("a1"), 16, 1))
    assert line(replica) == "A16! B12! | - | 0.000 | 32/4 | S[a0]<-None"


def test_a_step_says_what_each_request_found_in_the_cache():
    """The hit of a request is told once, with the step that admits it first."""
    replica = engine(8, budget=64)
    for name in "AB":
        replica.add(request(name, 9, 2, "a5"))
    assert replica.step()[0].admitted == {"A": 0, "B": 8}
    assert replica.step()[0].admitted == {}


def test_a_step_is_charged_for_what_it_computes():
    """Chunks of a prompt are charged with what lies before them, decoding sequences with the cache that they read."""
    time = default_time()
    replica = engine(32, budget=10)
    replica.add(request("A", 12, 3))
    steps = [replica.step()[0].duration_fs for _ in range(3)]
    assert steps == [
        time.step_fs(StepWork(prefills=((0, 10),))),
        time.step_fs(StepWork(prefills=((10, 2),))),
        time.step_fs(StepWork(decodes=1, kv_tokens=12)),
    ]


@pytest.mark.parametrize(("prompt", "output"), [(0, 1), (1, 0)])
def test_a_request_without_tokens_is_refused(prompt, output):
    """A prompt and an answer have at least one token each."""
    with pytest.raises(ValueError, match="at least one"):
        engine(8, budget=64).add(request("A", prompt, output))


def test_an_id_is_used_once_at_a_time():
    """Two live requests cannot share an id."""
    replica = engine(8, budget=64)
    replica.add(request("A", 4, 2))
    with pytest.raises(ValueError, match="already in use"):
        replica.add(request("A", 4, 2))


def test_the_repr_shows_queues_and_cache():
    """An engine shows at a glance what it does."""
    replica = engine(8, budget=64, max_num_seqs=1)
    replica.add(request("A", 4, 2))
    replica.add(request("B", 4, 2))
    replica.step()
    assert repr(replica) == "<SimReplica 1 running, 1 waiting, <BlockPool 1 of 8 blocks referenced, 1 cached>>"


REQUESTS = st.lists(
    st.tuples(st.sampled_from(["x5", "x9", "y3"]), st.integers(1, 40), st.integers(1, 12), st.integers(0, 20)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=100, deadline=None)
@given(REQUESTS, st.integers(4, 64), st.integers(1, 4), st.booleans())
def test_every_request_that_fits_is_answered_in_full(requests, budget, seqs, reserve):
    """Whatever arrives when, each request gets exactly its tokens, and in the end no block is held."""
    replica = engine(16, budget=budget, max_num_seqs=seqs, reserve_full_prompt=reserve)
    outputs = {RequestId(str(number)): output for number, (_, _, output, _) in enumerate(requests)}
    produced = dict.fromkeys(outputs, 0)
    for now in range(3000):
        for number, (shared, prompt, output, arrival) in enumerate(requests):
            if arrival == now:
                replica.add(request(str(number), prompt, output, shared, f"{number % 10}20"))
        step, result = replica.step()
        assert sum(step.scheduled.values()) <= budget
        assert len(replica.running) <= seqs
        for name in result.produced:
            produced[name] += 1
        if now > 20 and not replica.has_work:
            break
    assert produced == outputs
    assert replica.pool.free_blocks == replica.pool.usable_blocks


def offloaded(usable: int = 8, blocks: int = 64, **limits: Any) -> SimReplica:
    pool = BlockPool(usable + 1, SIZE)
    return SimReplica(pool, Limits(**limits), default_time(), Offload(blocks, block_copy_fs=FS))


def test_what_the_cache_lost_comes_back_from_cpu_memory_at_its_price():
    """A prompt hits what CPU memory has after the cache's own hits, and its step waits for the copy."""
    replica = offloaded()
    replica.add(request("A", 16, 1))
    assert line(replica).endswith("S[A0,A1,A2,A3]<-None S[A0]<-None S[A1]<-A0 S[A2]<-A1 S[A3]<-A2")
    replica.add(request("B", 28, 1))
    replica.step()
    replica.add(request("C", 20, 1, "A20"))
    step, result = replica.step()
    assert (step.admitted, step.scheduled) == ({"C": 16}, {"C": 4})
    assert step.duration_fs == 3 * FS + default_time().step_fs(StepWork(prefills=((16, 4),)))
    assert written(result.events) == "R[B6] R[B5] R[B4] S[A1,A2,A3]<-A0 R[B3] S[A4]<-A3 S[A4]<-A3"
    assert [event.medium for event in result.events] == ["GPU"] * 6 + ["CPU"]
    counters = replica.counters
    assert (counters.prefix_hits, counters.external_queries, counters.external_hits) == (4, 16 + 28 + 16, 12)


def test_what_is_hit_in_the_cache_is_used_in_cpu_memory_too():
    """A prompt keeps young behind the cache what it found in it, and copies again what is gone there."""
    replica = offloaded(usable=32, blocks=6)
    for name in ("A", "B"):
        replica.add(request(name, 16, 1))
        replica.step()
    replica.add(request("C", 20, 1, "A20"))
    step, result = replica.step()
    assert step.admitted == {"C": 16}
    of_cpu = [event for event in result.events if event.medium == "CPU"]
    assert written(of_cpu) == "R[B3] R[B2] R[B1] S[A2]<-A1 S[A3]<-A2 S[A4]<-A3"


def test_what_came_from_cpu_memory_is_not_offered_to_it_again():
    """Neither that nor what the cache had before it."""
    replica = offloaded(usable=8, blocks=64)
    replica.add(request("A", 16, 1))
    replica.step()
    replica.add(request("B", 28, 1))
    replica.step()
    replica.add(request("C", 16, 1, "A20"))
    _, result = replica.step()
    assert [event for event in result.events if event.medium == "CPU"] == []


def test_a_reset_may_leave_cpu_memory_or_empty_it_too():
    """The engine's own cache can be emptied alone."""
    replica = offloaded()
    for external, cached in ((False, 12), (True, 0)):
        replica.add(request("A", 16, 1))
        replica.step()
        assert replica.reset(external=external)
        replica.add(request("C", 16, 1, "A20"))
        assert replica.step()[0].admitted == {"C": cached}
        replica.reset(external=True)


def test_priorities_need_their_policy():
    """As at vLLM, a priority under first come, first served is an error."""
    with pytest.raises(ValueError, match="priority"):
        engine(8, budget=64).add(request("A", 4, 2, priority=1))


def test_without_chunks_a_prompt_waits_for_a_budget_that_holds_it():
    """What is left of a step's budget is not filled with part of a prompt, and those behind it wait too."""
    replica = engine(32, budget=16, enable_chunked_prefill=False)
    for name, prompt in (("A", 10), ("B", 8), ("C", 4)):
        replica.add(request(name, prompt, 2))
    assert schedule(replica, 3) == ["A10", "A1! B8 C4", "B1! C1!"]


def test_a_request_may_leave_the_cache_unread():
    """Where logprobs of the prompt are wanted all of it is computed, stored once more, and not counted as looked up."""
    replica = engine(32, budget=64)
    replica.add(request("A", 9, 1))
    replica.add(SimRequest(RequestId("B"), chain("A20"), 9, 1, reads_cache=False))
    assert line(replica) == "A9! B9! | - | 0.000 | 9/0 | S[A0,A1]<-None S[A0,A1]<-None"
