"""The engines of a simulation, and the news of them."""

from __future__ import annotations

from random import Random

import pytest

from kvroute.kv.chain import PrefixChain
from kvroute.sim.replica import SimRequest
from kvroute.sim.simulation_clock import Clock
from kvroute.sim.simulation_knowledge import ExactView
from kvroute.sim.simulation_pool import Pool
from kvroute.sim.simulation_routers import Front, id_of
from kvroute.sim.simulation_settings import Happening, RouterSettings
from kvroute.sim.workload import Story
from tests.sim.fleets import engine

TURN = Story(16).tell("x", 160).ask("y", 40)


class Listening:
    """Writes down what it is told, and lets the metrics be read for a while."""

    def __init__(self, clock):
        self.clock = clock
        self.heard = []

    @property
    def is_over(self):
        return self.clock.now_s > 4

    def progressed(self, number, progress):
        self.heard += [("finished", id) for id in progress.finished]

    def joined(self, number):
        self.heard.append(("joined", number))

    def broke(self, number):
        self.heard.append(("broke", number))

    def reported(self, at_s, waiting, cache_used):
        self.heard.append(("reported", at_s))


def pool_of(*happenings, **settings):
    clock, told = Clock(), RouterSettings(**settings)
    ids = [id_of(n) for n in range(3)]
    view = ExactView(ids)
    front = Front(told, engine(), view, Random(1))
    listener = Listening(clock)
    pool = Pool(clock, engine(), told, [front], [view], Random(2), listener=listener)
    pool.start(2, happenings)
    return clock, pool, front, view, listener


def ask(number):
    return SimRequest(f"q{number}", PrefixChain(TURN.chain), 160, 40)


def test_a_request_is_answered_and_its_blocks_are_known():
    """What an engine computed is told to the view, and its end to the listener."""
    clock, pool, _, view, listener = pool_of()
    assert pool.send(1, ask(1))
    clock.run()
    assert ("finished", "q1") in listener.heard
    assert view.holding(TURN.chain) == {"r1": 12}


@pytest.mark.parametrize(("settings", "known"), [({"event_lag_s": 2.0}, [0, 12]), ({"event_loss": 1.0}, [0, 0])])
def test_events_may_be_late_or_lost(settings, known):
    """With a lag nothing is known before it has passed; what is lost is never known."""
    clock, pool, _, view, _ = pool_of(**settings)
    pool.send(0, ask(1))
    seen = []
    for at in (1.0, 3.0):
        clock.at(round(at * 10**15), lambda _: seen.append(view.holding(TURN.chain).get("r0", 0)))
    clock.run()
    assert seen == known


def test_a_crashed_engine_takes_nothing_and_is_noticed_later():
    """The listener hears at once, the fleet when the health check fails, and a new engine joins in its place."""
    clock, pool, front, _, listener = pool_of(Happening(1.0, "crash", 0), Happening(3.0, "join", 0), health_after_s=0.5)
    seen = []
    for at in (1.2, 1.8, 3.5):
        clock.at(
            round(at * 10**15), lambda _: seen.append((pool.send(0, ask(clock.now_fs)), len(front.fleet.replicas())))
        )
    clock.run()
    assert seen == [(False, 2), (False, 1), (True, 2)]
    assert [what for what in listener.heard if what[0] in ("broke", "joined")] == [("broke", 0), ("joined", 0)]


def test_a_leaving_replica_drains():
    """It gets nothing new, and what runs there ends."""
    clock, pool, front, _, listener = pool_of(Happening(0.05, "leave", 1))
    pool.send(1, ask(1))
    clock.run()
    assert [state.is_draining for state in front.fleet.states()] == [False, True]
    assert ("finished", "q1") in listener.heard


@pytest.mark.parametrize(("lag_s", "first"), [(0.0, 1.0), (0.7, 1.7)])
def test_metrics_come_regularly_and_with_their_lag(lag_s, first):
    """Routers hear of every engine's load, as old as the lag."""
    clock, pool, front, _, listener = pool_of(metrics_lag_s=lag_s)
    pool.send(0, ask(1))
    seen = []
    for at in (first - 0.01, first + 0.01):
        clock.at(round(at * 10**15), lambda _: seen.append(front.fleet.states()[0].load.generation_tokens))
    clock.run()
    assert seen == [0, 40]
    assert [at for what, at in listener.heard if what == "reported"] == [1.0, 2.0, 3.0, 4.0, 5.0]
