"""Steps that are skipped and steps that are played one by one give the same result, to the last digit."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.pool import BlockPool
from kvroute.sim.replica import Limits, Offload, RequestId, SimReplica, SimRequest, Step, StepResult
from tests.kv.notation import chain

SIZE = 4


def request(name: str, prompt: int, output: int, shared: str = "", priority: int = 0) -> SimRequest:
    parts = (shared, f"{name[0]}60") if shared else (f"{name[0]}60",)
    return SimRequest(RequestId(name), chain(*parts), prompt, output, priority)


class Player:
    """Plays steps on a replica, at once where they are idle and that is allowed, and notes all that they bring."""

    def __init__(self, replica: SimReplica, *, skips: bool) -> None:
        self.replica, self.skips = replica, skips
        self.passed_fs = self.steps = 0
        self.notes: list[Any] = []
        self.played = 0

    def play(self, steps: int) -> None:
        while steps and self.replica.has_work:
            idle = min(self.replica.idle_steps(), steps) if self.skips else 0
            if idle:
                self.passed_fs += self.replica.idle_fs(idle)
                self.replica.skip(idle)
            else:
                self._note(self.replica.begin(names=False), self.replica.end())
            self.steps += idle or 1
            steps -= idle or 1

    def _note(self, step: Step, result: StepResult) -> None:
        self.passed_fs += step.duration_fs
        self.played += 1
        if step.admitted or step.preempted or result.first or result.finished or result.events:
            self.notes.append((self.steps, self.passed_fs, step.admitted, step.preempted, result))

    def look(self) -> None:
        replica = self.replica
        self.notes.append((self.steps, self.passed_fs, replica.pool.used_fraction, replica.running, replica.waiting))


def played(seed: int, usable: int, limits: Limits, offload: Offload | None, *, skips: bool) -> Player:
    """Add, abort and reset at random between random numbers of steps."""
    rng = random.Random(seed)
    player = Player(SimReplica(BlockPool(usable + 1, SIZE), limits, offload=offload), skips=skips)
    for number in range(rng.randint(1, 25)):
        player.play(rng.choice((0, 1, 2, 5, 30, 100)))
        if number and rng.random() < 0.2:
            player.notes.append(player.replica.abort(RequestId(f"{chr(97 + rng.randrange(number))}x")))
        if rng.random() < 0.1:
            player.notes.append(player.replica.reset())
        name, shared = f"{chr(97 + number)}x", rng.choice(("", "z1", "z3", "z9"))
        priority = rng.randint(0, 3) if limits.policy == "priority" else 0
        player.replica.add(request(name, rng.randint(1, 60), rng.randint(1, 60), shared, priority))
        player.look()
    player.play(10_000)
    player.look()
    return player


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10**9),
    st.sampled_from([31, 45, 200]),
    st.sampled_from([1, 3, 16, 4096]),
    st.sampled_from([2, 5, 100]),
    st.sampled_from(["fcfs", "priority"]),
    st.booleans(),
    st.booleans(),
    st.sampled_from([None, Offload(20, 10**11), Offload(200, 10**11)]),
)
def test_skipping_and_single_steps_give_the_same_result(seed, usable, budget, seqs, policy, is_async, reserve, offload):
    """Admissions, hits, preemptions, tokens, events, usage, counters and times agree."""
    limits = Limits(
        max_num_batched_tokens=budget,
        max_num_seqs=seqs,
        policy=policy,
        async_scheduling=is_async,
        reserve_full_prompt=reserve,
    )
    skipped, single = (played(seed, usable, limits, offload, skips=skips) for skips in (True, False))
    assert skipped.notes == single.notes
    assert skipped.replica.counters == single.replica.counters
    assert skipped.replica.pool.queue() == single.replica.pool.queue()
    assert not skipped.replica.has_work


def test_a_long_answer_is_played_in_as_many_steps_as_it_has_blocks():
    """Of 236 tokens only those are played that take a block, fill one, or come first or last."""
    player = Player(SimReplica(BlockPool(65, SIZE)), skips=True)
    player.replica.add(request("ax", 4, 236))
    player.play(1000)
    assert (player.steps, player.played) == (236, 1 + 59 + 58 + 1)
