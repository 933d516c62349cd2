"""All engines of a simulation: their steps, their lives, and the news of them that routers get, late and in part."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random
from typing import Any, Protocol

from kvroute.kv.pool import CacheEvent
from kvroute.routing.replica import Load
from kvroute.sim.replica import SimRequest
from kvroute.sim.simulation_clock import STEPS, Clock, fs_of
from kvroute.sim.simulation_engines import Engine, Progress
from kvroute.sim.simulation_knowledge import Knowledge
from kvroute.sim.simulation_routers import Front, id_of, replica_of
from kvroute.sim.simulation_settings import EngineSettings, Happening, RouterSettings


class Listener(Protocol):
    """Who is told what engines did."""

    def progressed(self, number: int, progress: Progress) -> None:
        """A step has ended."""

    def joined(self, number: int) -> None:
        """An engine is there, new and empty."""

    def broke(self, number: int) -> None:
        """An engine crashed, and all that ran there is lost."""

    def reported(self, at_s: float, waiting: int, cache_used: float) -> None:
        """All metrics were read."""

    @property
    def is_over(self) -> bool:
        """Whether nothing is to come any more."""


class Pool:
    """The engines by number."""

    def __init__(
        self,
        clock: Clock,
        engine: EngineSettings,
        routers: RouterSettings,
        fronts: Sequence[Front],
        views: Sequence[Knowledge],
        rng: Random,
        *,
        listener: Listener,
        skips: bool = True,
    ) -> None:
        self._clock = clock
        self._engine = engine
        self._routers = routers
        self._fronts = fronts
        self._views = views
        self._rng = rng
        self._listener = listener
        self._skips = skips
        self._engines: dict[int, Engine] = {}
        self._retired: list[Engine] = []

    def start(self, count: int, happenings: Sequence[Happening]) -> None:
        """Let the first engines join, and schedule what befalls them."""
        for number in range(count):
            self._join(number)
        for one in happenings:
            self._clock.at(fs_of(one.at_s), self._happen, one)
        self._clock.after(self._routers.metrics_every_s, self._report)

    def send(self, number: int, request: SimRequest) -> bool:
        """Give an engine a request; False where there is none any more."""
        engine = self._engines.get(number)
        if engine is None or engine.is_gone:
            return False
        before_fs = engine.due_fs
        engine.add(request, self._clock.now_fs)
        if engine.due_fs is not None and engine.due_fs != before_fs:
            self._clock.at(engine.due_fs, self._end_step, engine, STEPS)
        return True

    def all(self) -> list[Engine]:
        """Return every engine that there was."""
        return [*self._retired, *self._engines.values()]

    def _end_step(self, engine: Engine) -> None:
        if engine.is_gone or engine.due_fs != self._clock.now_fs:
            return  # the step was cut short, or the engine crashed
        progress = engine.end(self._clock.now_fs)
        if engine.due_fs is not None:
            self._clock.at(engine.due_fs, self._end_step, engine, STEPS)
        if progress.events:
            self._tell(engine.number, progress.events)
        if progress.hits or progress.began or progress.finished:
            self._listener.progressed(engine.number, progress)

    def _tell(self, number: int, events: Sequence[CacheEvent]) -> None:
        """Have the routers know what happened in a cache."""
        lag_s, loss = self._routers.event_lag_s, self._routers.event_loss
        for view in self._views:
            if loss and self._rng.random() < loss:
                continue
            if lag_s:
                self._clock.after(lag_s, hear, (view, number, events))
            else:
                view.happened(number, events)

    def _happen(self, one: Happening) -> None:
        engine = self._engines.get(one.replica)
        is_here = engine is not None and not engine.is_gone
        if one.kind == "join" and not is_here:
            self._join(one.replica)
            self._listener.joined(one.replica)
        elif one.kind == "leave" and is_here:
            for front in self._fronts:
                front.fleet.set_draining(id_of(one.replica), True)
        elif one.kind == "crash" and engine is not None and is_here:
            engine.catch_up(self._clock.now_fs)
            engine.is_gone = True
            self._clock.after(self._routers.health_after_s, self._notice, engine)
            self._listener.broke(one.replica)

    def _notice(self, engine: Engine) -> None:
        """A health check fails: the replica is out until a new one joins in its place."""
        if self._engines.get(engine.number) is engine:
            self._forget(engine.number)

    def _join(self, number: int) -> None:
        if number in self._engines:
            self._retired.append(self._engines[number])
        self._engines[number] = Engine(self._engine, number, skips=self._skips)
        self._forget(number)
        for front in self._fronts:
            front.fleet.join(replica_of(number, self._engine), self._clock.now_s)

    def _forget(self, number: int) -> None:
        for front in self._fronts:
            front.fleet.leave(id_of(number))
        for view in self._views:
            view.join(number, self._engine.num_blocks - 1)

    def _report(self, _: None) -> None:
        """Read every engine's metrics."""
        waiting, used, alive = 0, 0.0, 0
        for number, engine in self._engines.items():
            if engine.is_gone:
                continue
            load = engine.load(self._clock.now_fs, self._clock.now_s)
            waiting, used, alive = waiting + load.waiting, used + load.kv_used_fraction, alive + 1
            if self._routers.metrics_lag_s:
                self._clock.after(self._routers.metrics_lag_s, self._hear_load, (number, load))
            else:
                self._hear_load((number, load))
        self._listener.reported(self._clock.now_s, waiting, used / max(alive, 1))
        if not self._listener.is_over:
            self._clock.after(self._routers.metrics_every_s, self._report)

    def _hear_load(self, what: tuple[int, Load]) -> None:
        number, load = what
        for front in self._fronts:
            front.fleet.report(id_of(number), load, self._clock.now_s)


def hear(what: tuple[Knowledge, int, Any]) -> None:
    """Have a router take in late events."""
    view, number, events = what
    view.happened(number, events)
