"""Whole runs."""

from __future__ import annotations

import tracemalloc
from itertools import islice

import pytest

from kvroute.routing.hold import Hold
from kvroute.routing.router import POLICIES
from kvroute.sim.replica import Offload
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_clock import fs_of
from kvroute.sim.simulation_settings import Happening, RouterSettings
from kvroute.sim.workload import Script, opened
from kvroute.sim.workload_profiles import generated
from tests.sim.fleets import engine, once, play, talk


def chats(seed=1, count=300, **parameters):
    given = {"sessions": "60", "rate": "4", "think": "3", **parameters}
    return islice(opened(generated("chat", given, 16, seed)), count)


def agents(seed=1):
    return generated("agent", {"sessions": "12", "rate": "2", "turns": "8", "tools": "3000", "think": "1"}, 16, seed)


@pytest.mark.parametrize("policy", POLICIES)
def test_the_same_seed_gives_the_same_run_to_the_last_digit(policy):
    """Two runs of a seed agree in every figure, under every policy, with every kind of lag and loss."""
    settings = {"count": 3, "event_lag_s": 0.2, "event_loss": 0.05, "ledger_loss": 0.2, "metrics_lag_s": 0.5}
    happenings = (Happening(2.0, "crash", 1), Happening(5.0, "join", 1), Happening(6.0, "leave", 0))

    def run(seed):
        return play(agents(), 3, policy, kv_tokens=60_000, seed=seed, happenings=happenings, **settings)

    one, again = run(7), run(7)
    assert one == again
    assert one.requests == one.completed + one.failed > 50


@pytest.mark.parametrize("policy", ["kvroute", "least-request"])
@pytest.mark.parametrize("kv_tokens", [12_000, 40_000, 200_000])
def test_skipped_steps_do_not_change_a_run(policy, kv_tokens):
    """Whether or not decode steps are skipped, every figure is equal, preemptions and evictions included."""
    one, other = (play(agents(3), 2, policy, kv_tokens=kv_tokens, skips=skips) for skips in (True, False))
    assert one == other
    if kv_tokens == 12_000:
        assert (one.preemptions > 0) == (policy == "least-request")


def test_holding_is_production_s_own():
    """Where memory is short kvroute holds, and its held time counts; told never to hold, it does not."""
    work = {"kv_tokens": 12_000, "policy": "kvroute"}
    holding, never = play(agents(3), 2, **work), play(agents(3), 2, admission=None, **work)
    assert (holding.held.count > 0, never.held.count) == (True, 0)
    assert holding.preemptions < never.preemptions


def test_cpu_memory_behind_the_caches_saves_what_they_lose():
    """With it more is hit and less computed again; skipped steps change nothing here either."""
    offload = Offload(4_000, fs_of(1e-5))
    with_it, single = (play(agents(3), 2, kv_tokens=16_000, offload=offload, skips=skips) for skips in (True, False))
    without = play(agents(3), 2, kv_tokens=16_000)
    assert with_it.hit_share > without.hit_share + 0.05
    assert with_it.refault_tokens < without.refault_tokens
    assert with_it == single


def test_every_request_is_accounted_for():
    """All are completed, their tokens counted, and hits are at most what one endless cache would have had."""
    result = play(chats())
    assert (result.requests, result.completed, result.failed) == (300, 300, 0)
    assert 0 < result.hit_tokens <= result.reachable_tokens < result.prompt_tokens
    assert result.end_to_end.count == result.ttft.count == 300
    assert result.span_s > 0 < result.output_tokens_s


def test_prefixes_are_found_by_those_who_look_for_them():
    """Conversations hit what they left, except where requests are spread regardless."""
    hits = {
        policy: play(chats(), 4, policy).reached_share for policy in ("kvroute", "lmetric", "round-robin", "random")
    }
    assert min(hits["kvroute"], hits["lmetric"]) > 0.85 > 0.8 > max(hits["round-robin"], hits["random"])


def test_a_lone_request_takes_what_its_steps_take():
    """Time to first token is one prefill; the end comes after all decode steps of the engine's own model."""
    result = play(iter([once(3.0, "a", tokens=1000, output=11)]), 1)
    time = engine().time
    first = result.ttft.mean
    steps = time.decode_fs(10, 1, 1000) / 1e15
    assert result.end_to_end.mean == pytest.approx(first + steps, rel=1e-9)
    assert result.token_time.mean == pytest.approx(steps / 10, rel=1e-9)


def test_the_next_turn_comes_after_the_answer_and_a_pause():
    """A closed loop waits: a conversation takes its answers and its pauses, and no more."""
    alone = play(iter([talk(0.0, "a", 5, think_s=7.0)]), 1)
    assert (alone.requests, alone.scripts) == (5, 1)
    answers = alone.end_to_end.mean * 5
    assert alone.conversation.mean == pytest.approx(4 * 7.0 + answers)


def test_requests_before_the_warm_up_are_not_counted():
    """They fill the caches and leave no trace in the figures."""
    both = [once(0.0, "a", shared=3200), once(50.0, "b", shared=3200)]
    result = play(iter(both), 1, warmup_s=10.0)
    assert (result.requests, result.completed) == (1, 1)
    assert result.hit_tokens == 3200
    assert result.span_s < 10


def test_what_never_fits_is_refused_and_long_answers_are_cut():
    """A prompt over the cache fails, its conversation ends; an answer over what is left is cut short."""
    result = play(iter([talk(0.0, "a", 3, grows=3000), once(0.0, "b", tokens=900, output=5000)]), 1, kv_tokens=3200)
    assert (result.requests, result.completed, result.failed, result.cut) == (3, 2, 1, 1)
    assert (result.scripts, result.lost) == (1, 1)
    assert result.output_tokens == 50 + 3200 - 900


def test_refaults_are_what_was_evicted_and_came_back():
    """A prompt that a replica had, lost and computes again is a refault; new text is none."""
    sizes = [once(float(n), key, tokens=1600, output=1) for n, key in enumerate("abcab")]
    result = play(iter(sizes), 1, kv_tokens=3300)
    assert result.hit_tokens + result.refault_tokens == 2 * 1599
    assert result.refault_tokens > 1599
    assert play(iter([once(float(n), key) for n, key in enumerate("abc")]), 1).refault_tokens == 0


def test_a_crash_is_retried_where_nothing_was_seen():
    """Requests without a first byte go to another replica; those that had begun to answer fail."""
    work = [once(0.0, f"q{n}", tokens=30_000, output=2000) for n in range(6)]
    result = play(iter(work), 2, happenings=(Happening(2.5, "crash", 0),), kv_tokens=400_000)
    assert result.failed + result.completed == 6
    assert result.failed >= 1
    assert result.retried >= 1


def test_requests_wait_for_a_replica_that_is_to_come():
    """Without a replica a request waits a bounded time: the new one serves it, or it fails."""
    crash = Happening(0.0, "crash", 0)
    served = play(iter([once(2.0, "a")]), 1, happenings=(crash, Happening(5.0, "join", 0)))
    assert (served.completed, served.ttft.mean > 3.0) == (1, True)
    lost = play(iter([once(2.0, "a")]), 1, happenings=(crash,))
    assert (lost.completed, lost.failed) == (0, 1)


def test_a_joined_replica_takes_its_share():
    """After another replica joined, the work is spread over both."""
    alone = play(chats(count=200, rate="20"), 1)
    helped = play(chats(count=200, rate="20"), 1, happenings=(Happening(1.0, "join", 1),))
    assert helped.end_to_end.mean < alone.end_to_end.mean
    assert helped.imbalance < 1.9


def test_routers_that_share_hit_more_than_routers_that_do_not():
    """With private knowledge a conversation's next turn does not find its cache at another router."""
    shared, private = (
        play(agents(), 4, count=4, knowledge="sent", is_shared=is_shared).hit_share for is_shared in (True, False)
    )
    assert shared > private + 0.05


def test_lost_events_cost_hits():
    """What routers are not told, they cannot use."""
    all_, some = (play(agents(), 4, event_loss=loss).hit_share for loss in (0.0, 0.6))
    assert some < all_


@pytest.mark.slow
def test_memory_follows_what_is_in_flight_and_not_the_trace():
    """Eight times the requests need hardly more memory."""

    def peak(count):
        work = (once(n * 0.05, f"q{n}", tokens=160, output=2) for n in range(count))
        tracemalloc.start()
        play(work, 2, "least-request", kv_tokens=4000, history_blocks=500)
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    small = peak(200)
    assert peak(1600) < 1.5 * small


def test_progress_is_reported():
    """A caller that wants to show how far it is hears so now and then."""
    seen = []
    play(chats(), on_progress=lambda done, at_s: seen.append((done, at_s)))
    assert seen == sorted(seen)
    assert len(seen) == 4


class HoldingRouter:
    """Holds every request until a first one has ended: stands where admission will."""

    def __init__(self, router, hold_s):
        self._router = router
        self._hold_s = hold_s
        self._holds = {}
        self.is_free = True

    def admit(self, demand, hits, now, avoid=frozenset(), hold=None):
        if self.is_free or (hold is not None and now >= hold.until_s):
            self.is_free = False
            self._holds.pop(hold, None)
            return self._router.place(demand, hits, now, avoid)
        hold = hold or Hold(len(self._holds), demand, now, now + self._hold_s, "one at a time")
        self._holds[hold] = None
        return hold

    def released(self, now):
        if any(state.promised.requests for state in self._router.fleet.states()):
            return ()
        self.is_free = True
        return tuple(self._holds)[:1]


@pytest.mark.parametrize(("hold_s", "held"), [(100.0, 3), (0.01, 3)])
def test_held_requests_wait_until_they_are_released_or_their_time_has_come(hold_s, held):
    """Held time is measured and part of the time to the first token; every held request is placed in the end."""
    work = (once(0.0, f"q{n}", tokens=500, output=400) for n in range(4))
    run = Simulation(work, 1, engine(), RouterSettings())
    [front] = run._fronts
    front.router = HoldingRouter(front.router, hold_s)
    result = run.run()
    assert (result.completed, result.held.count) == (4, held)
    assert result.ttft.most >= result.held.most
    assert (result.held.most < 0.02) == (hold_s == 0.01)


def staged(*stages):
    """Make stages: of each, when it begins and the starts of its requests."""
    for begin_s, *starts in stages:
        for place, at_s in enumerate(starts):
            one = once(at_s, f"{begin_s} {place}")
            yield Script(one.start_s, one.turns, stage_s=None if place else begin_s)


def test_a_stage_waits_until_the_one_before_it_has_ended():
    """It comes at its time where that is over, else later, with all that follows; each is summed up by itself."""
    timely = play(staged((0.0, 0.0, 0.1), (60.0, 60.0, 60.5), (120.0, 121.0)), 1)
    assert [stage.requests for stage in timely.stages] == [2, 2, 1]
    assert timely.span_s > 121.0
    late = play(staged((0.0, 0.0, 0.1), (0.2, 0.2, 0.3), (0.4, 0.4)), 1)
    assert late.span_s == pytest.approx(sum(stage.span_s for stage in late.stages))
    assert sum(stage.output_tokens for stage in late.stages) == late.output_tokens == 5 * 50
    assert max(stage.ttft.most for stage in late.stages) == late.ttft.most
    assert play(iter([once(0.0, "a")]), 1).stages == ()


def test_an_open_loop_does_not_wait_for_stages():
    """Its requests come at their times."""
    scripts = list(opened(staged((0.0, 0.0, 0.1), (0.2, 0.2))))
    assert [(script.start_s, script.stage_s) for script in scripts] == [(0.0, None), (0.1, None), (0.2, None)]


@pytest.mark.parametrize("at_once", [1, 3])
def test_clients_with_a_bound_wait_outside(at_once):
    """So many run at a time and no more; who waits at its client is late, and that is in no figure."""
    scripts = [once(0.001 * n, f"{n}") for n in range(12)]
    bound, free = play(iter(scripts), 1, at_once=at_once), play((once(0.001 * n, f"{n}") for n in range(12)), 1)
    assert bound.completed == free.completed == 12
    assert bound.ttft.mean < free.ttft.mean
    assert bound.span_s > free.span_s
    alone = play(iter([once(0.0, "alone")]), 1)
    if at_once == 1:
        assert bound.span_s == pytest.approx(12 * alone.span_s, rel=0.01)
        assert bound.ttft.most == pytest.approx(alone.ttft.most, rel=0.01)


def test_a_bound_and_stages_go_together():
    """A stage still waits for those who wait at their clients."""
    found = play(staged((0.0, *[0.0] * 7), (1.0, *[1.0] * 7)), 2, at_once=2)
    assert [stage.requests for stage in found.stages] == [7, 7]
    assert found.completed == 14
