"""One task that runs a SimReplica in real time, and the requests that wait for it.

Each step takes as long as the engine's model says. Steps shorter than COALESCE_S are run together before the task
sleeps, so that a fast replica costs its own work and not a timer for each token; readers then find several tokens at
once, as they do at a real server that lags behind its engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

from msgspec import Struct

from kvroute.errors import Overloaded
from kvroute.fake.events import EventFeed, Story
from kvroute.fake.timings import Clocked, Timings
from kvroute.sim.replica import RequestId, SimReplica, SimRequest, StepResult

COALESCE_S = 0.002
QUEUE_LIMIT = 4096  # sequences waiting for admission; more are refused, as with --max-num-queued-reqs


class Gauges(Struct, frozen=True):
    """What metrics say of the engine: of the end of its last step, as at vLLM, so not of who came or left since."""

    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0


class EngineBusy(Overloaded):
    """The queue is full. Status, kind and words are vLLM's."""

    status = 503
    kind = "Service Unavailable"

    def __init__(self) -> None:
        super().__init__(
            "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance."
        )


class Progress:
    """How far one sequence is."""

    __slots__ = ("cached_tokens", "clocked", "id", "is_aborted", "is_done", "job", "produced_tokens")

    def __init__(self, request: SimRequest, job: Job, now_s: float) -> None:
        self.id = request.id
        self.job = job
        self.clocked = Clocked(now_s, request.prompt_tokens)
        self.produced_tokens = 0
        self.cached_tokens = 0  # known once the sequence was admitted
        self.is_done = False
        self.is_aborted = False  # the engine gave up on it; `is_done` is set too


class Job:
    """The sequences of one client request."""

    def __init__(self, requests: Sequence[SimRequest], now_s: float) -> None:
        self.sequences = [Progress(request, self, now_s) for request in requests]
        self._news = asyncio.Event()

    @property
    def is_done(self) -> bool:
        """Whether every sequence has ended."""
        return all(sequence.is_done for sequence in self.sequences)

    def notify(self) -> None:
        """Wake the reader."""
        self._news.set()

    async def changed(self) -> None:
        """Wait for progress since the last call."""
        await self._news.wait()
        self._news.clear()


class Driver:
    """Owns the replica: everything that touches it goes through here."""

    def __init__(self, replica: SimReplica, feed: EventFeed | None = None, *, max_model_len: int = 32_768) -> None:
        self.replica = replica
        self.timings = Timings(max_model_len)
        self.feed = feed  # told what sequences say and what each step changes; None where nobody listens
        self.slowdown = 1.0  # multiplies the duration of every step
        self.is_stopping = False  # requests that come are aborted at once
        self.sleep_level: int | None = None  # None = awake
        self.gauges = Gauges()
        self._unseen: set[RequestId] = set()  # who came since the last step was scheduled
        self._is_hung = False
        self._live: dict[RequestId, Progress] = {}
        self._wake = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the task."""
        self._task = asyncio.create_task(self._run(), name="sim-engine")

    async def close(self) -> None:
        """Abort what is under way and end the task."""
        self.abort_all()
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    def submit(self, requests: Sequence[SimRequest], stories: Sequence[Story] = ()) -> Job:
        """Queue the sequences of a request. A replica that is stopping aborts them at once.

        `stories`, one for each sequence, are for the event feed, where there is one.

        Raises:
            EngineBusy: the queue is full.
        """
        if self.replica.waiting_count + len(requests) > QUEUE_LIMIT:
            raise EngineBusy
        job = Job(requests, time.monotonic())
        if self.feed is not None:
            for request, story in zip(requests, stories, strict=True):
                self.feed.joined(request.id, story)
        for request, progress in zip(requests, job.sequences, strict=True):
            self.replica.add(request)
            self._unseen.add(request.id)
            self._live[request.id] = progress
        self._is_empty.clear()
        if self.is_stopping:
            self.give_up(job)
        self._wake.set()
        return job

    def abort(self, job: Job) -> None:
        """Drop what is left of a job, because its client left."""
        for sequence in job.sequences:
            if not sequence.is_done:
                self._drop(sequence)
        self._wake.set()

    def give_up(self, job: Job) -> None:
        """Abort a job on the engine's side: its client is told so."""
        self.abort(job)
        job.notify()

    def abort_all(self) -> None:
        """Give up on everything, as an engine that was told to stop: clients see finish_reason "abort"."""
        self.is_stopping = True
        self._abort_live()

    def sleep(self, level: int, *, is_abrupt: bool) -> None:
        """Stop stepping until `wake`; requests that come meanwhile wait. From level 1 on the cache is emptied.

        `is_abrupt` aborts what is under way first. Without it nothing is aborted, and a busy cache keeps what it holds.
        """
        if is_abrupt:
            self._abort_live()
        self.sleep_level = level
        if level >= 1:
            self.replica.pool.reset()
        self._wake.set()

    def wake(self) -> None:
        """Go on after `sleep`."""
        self.sleep_level = None
        self._wake.set()

    @property
    def is_sleeping(self) -> bool:
        """Whether it steps no more until it is woken."""
        return self.sleep_level is not None

    @property
    def _is_paused(self) -> bool:
        return self._is_hung or self.is_sleeping

    async def drained(self) -> None:
        """Wait until no request is under way."""
        await self._is_empty.wait()

    def _abort_live(self) -> None:
        for sequence in list(self._live.values()):
            self._drop(sequence)
            sequence.job.notify()

    def hang(self, is_hung: bool) -> None:
        """Stop stepping, or go on. A hung engine accepts requests and never answers."""
        self._is_hung = is_hung
        self._wake.set()

    def _drop(self, sequence: Progress) -> None:
        self.replica.abort(sequence.id)
        self._gone(sequence.id)
        sequence.is_done = sequence.is_aborted = True

    def _gone(self, request: RequestId) -> Progress:
        if self.feed is not None:
            self.feed.left(request)
        self._unseen.discard(request)
        progress = self._live.pop(request)
        if not self._live:
            self._is_empty.set()
        return progress

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            if self._is_paused or not self.replica.has_work:
                if not self._is_paused:
                    self._gauge()  # who was aborted is gone
                await self._sleep_until_woken()
                continue
            self._wake.clear()
            self._unseen.clear()
            step = self.replica.begin()
            began_s = time.monotonic()
            for request, cached_tokens in step.admitted.items():
                admitted = self._live[request]
                admitted.cached_tokens, admitted.clocked.admitted_s = cached_tokens, began_s
                if self.feed is not None:
                    self.feed.admitted(request, cached_tokens // self.replica.pool.block_size)
            due = max(due, loop.time()) + step.duration_s * self.slowdown
            delay = due - loop.time()
            await asyncio.sleep(delay if delay > COALESCE_S else 0)
            while self._is_paused:
                await self._sleep_until_woken()
            self._deliver(self.replica.end())
            self._gauge()
            if not step.scheduled and not step.preempted:
                await self._wake.wait()  # the first in the queue does not fit: only an abort can change that

    async def _sleep_until_woken(self) -> None:
        self._wake.clear()
        await self._wake.wait()

    def _gauge(self) -> None:
        replica = self.replica
        waiting = replica.waiting_count - len(self._unseen)
        self.gauges = Gauges(replica.running_count, waiting, replica.pool.used_fraction)

    def _deliver(self, result: StepResult) -> None:
        now_s, timings = time.monotonic(), self.timings
        for request in result.produced:
            progress = self._live[request]
            progress.produced_tokens += 1
            timings.token(progress.clocked, now_s)
            progress.job.notify()
        for request in result.finished:
            progress = self._gone(request)
            progress.is_done = True
            timings.finished(progress.clocked)
        if self.feed is not None:
            self.feed.stepped(result.events)
