"""Engines on the simulated clock: a `SimReplica` whose steps end when their time has come.

Its gauges are those of the end of its last step, as vLLM takes them (`Scheduler.update_from_output`): who arrives in a
step, and what the step takes, is not in them before it ends, however often they are read.

Steps that only decode are not played one by one: a run of them is one event, cut short at the end of the step under way
when a request arrives. The result is that of single steps to the last digit, since times are whole femtoseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

from kvroute.kv.pool import BlockPool, CacheEvent
from kvroute.routing.replica import Load
from kvroute.sim.engine import decode_steps_until
from kvroute.sim.replica import RequestId, SimReplica, SimRequest
from kvroute.sim.simulation_settings import EngineSettings


class Progress(Struct, frozen=True):
    """What a step brought."""

    hits: Mapping[RequestId, int] = {}  # requests admitted for the first time, and prompt tokens that each found cached
    began: Sequence[RequestId] = ()  # requests that got their first token
    finished: Sequence[RequestId] = ()
    events: Sequence[CacheEvent] = ()


class Engine:
    """One engine. It computes while it has work; call `end` at `due_fs`."""

    def __init__(self, settings: EngineSettings, number: int, *, skips: bool = True) -> None:
        self.number = number
        pool = BlockPool(settings.num_blocks, settings.block_size)
        self.replica = SimReplica(pool, settings.limits, settings.time, settings.offload)
        self.is_gone = False  # crashed
        self.due_fs: int | None = None  # end of the step or run under way, None = idle
        self._skips = skips
        self._since_fs = 0  # when that began
        self._run = 0  # steps of the run under way; 0 = a single step that was begun
        self._hits: dict[RequestId, int] = {}
        self._arrived = 0  # since the step under way began
        self._running = self._waiting = 0  # gauges, of the end of the last step
        self._used = 0.0

    def add(self, request: SimRequest, now_fs: int) -> None:
        """Take a request. It is looked at when the step under way ends."""
        if self._run:
            self.catch_up(now_fs)
            if self._run > 1:
                self._run = 1
                self.due_fs = self._since_fs + self.replica.idle_fs(1)
        self.replica.add(request)
        self._arrived += 1
        if self.due_fs is None:
            self._go(now_fs)

    def end(self, now_fs: int) -> Progress:
        """End what is due, and begin the next step if there is work."""
        if self._run:
            self.replica.skip(self._run)
            self._run = 0
            self._gauge()
            self._go(now_fs)
            return Progress()
        result = self.replica.end()
        hits, self._hits = self._hits, {}
        self.due_fs = None
        self._gauge()
        if self.replica.has_work:
            self._go(now_fs)
        return Progress(hits, result.first, result.finished, result.events)

    def catch_up(self, now_fs: int) -> None:
        """Perform the steps of a run that have ended by now, so that counters tell the truth."""
        if not self._run:
            return
        replica, elapsed_fs = self.replica, now_fs - self._since_fs
        steps = decode_steps_until(replica.time, elapsed_fs + 1, *replica.idle_load, self._run) - 1
        if steps > 0:
            self._since_fs += replica.idle_fs(steps)
            replica.skip(steps)
            self._run -= steps
            self._gauge()

    def load(self, now_fs: int, now_s: float) -> Load:
        """Return what its metrics say."""
        self.catch_up(now_fs)
        counters = self.replica.counters
        return Load(
            running=self._running,
            waiting=self._waiting,
            kv_used_fraction=self._used,
            preemptions=counters.preemptions,
            prefix_queries=counters.prefix_queries,
            prefix_hits=counters.prefix_hits,
            prompt_tokens=counters.prompt_tokens,
            generation_tokens=counters.generation_tokens,
            at_s=now_s,
        )

    def _gauge(self) -> None:
        replica = self.replica
        self._running, self._waiting = replica.running_count, replica.waiting_count - self._arrived
        self._used = replica.pool.used_fraction

    def _go(self, now_fs: int) -> None:
        self._since_fs = now_fs
        self._arrived = 0
        self._run = self.replica.idle_steps() if self._skips else 0
        if self._run:
            self.due_fs = now_fs + self.replica.idle_fs(self._run)
            return
        step = self.replica.begin(names=False)
        self._hits.update(step.admitted)
        self.due_fs = now_fs + max(step.duration_fs, 1)
