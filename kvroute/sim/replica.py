"""One simulated engine: vLLM's scheduler over a BlockPool, without clock, tokens or I/O.

A step has two halves, because time passes between them. `begin` schedules: it decides which sequence computes how many
tokens, takes blocks for them and says how long that lasts. `end` delivers: every sequence that is wholly computed gets
its next token, and those that have their last one leave. `step` is both, for callers without a clock.

Steps that only decode can be skipped: `idle_steps` says how many are ahead in which no block is taken or filled and
nothing begins or ends, and `skip` performs them at once. The result is the same as of single steps, to the last digit.

A request comes with the chain of prompt *and* answer: a simulated engine knows what it will say, and whoever asks cuts
the answer where the context ends. The rules are in `scheduler` and in `kvroute.kv.pool`; tests/vllm compares every step
with vLLM's own scheduler. Where the two differ on purpose:

- Who arrives is queued between two steps. With asynchronous scheduling vLLM may see it between the two steps that it
  schedules when it wakes up; here both are scheduled at once, and it is in the third.
- Models with windows or states are one pool of full blocks, of the size that vLLM reports, instead of several groups.
- Not modelled: adapters, speculative decoding, pipelines, structured output, a reset that preempts those that run.
"""

from __future__ import annotations

from kvroute.kv.offload import OffloadTier
from kvroute.kv.pool import BlockPool
from kvroute.sim.engine import StepTime, default_time
from kvroute.sim.flight import Flight
from kvroute.sim.scheduler import Scheduler
from kvroute.sim.sequence import Phase, Sequence
from kvroute.sim.values import Counters, Limits, Offload, RequestId, SimRequest, Step, StepResult

__all__ = ["Counters", "Limits", "Offload", "RequestId", "SimReplica", "SimRequest", "Step", "StepResult"]


class SimReplica:
    """A continuous-batching engine with a paged prefix cache."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits | None = None,
        time: StepTime | None = None,
        offload: Offload | None = None,
    ) -> None:
        self.pool = pool
        self.limits = limits or Limits()
        self.time = time or default_time()
        self.counters = Counters()
        self._copy_fs = offload.block_copy_fs if offload else 0
        self._tier = OffloadTier(offload.num_blocks) if offload else None
        self._scheduler = Scheduler(pool, self.limits, self.counters, self._tier)
        self._sequences: dict[RequestId, Sequence] = {}
        self._arrivals = 0
        self._flight: Flight | None = None  # the step between `begin` and `end`
        self._ahead: Flight | None = None  # the one after it, with asynchronous scheduling
        self._names: dict[Flight, dict[Sequence, int]] = {}  # who computes what, of steps for which that was asked

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Admitted sequences, oldest admission first."""
        return tuple(sequence.request.id for sequence in self._scheduler.running)

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Sequences without blocks, in the order in which they will be admitted."""
        return tuple(sequence.request.id for sequence in self._scheduler.waiting)

    @property
    def running_count(self) -> int:
        """How many sequences are admitted."""
        return len(self._scheduler.running)

    @property
    def waiting_count(self) -> int:
        """How many sequences wait, preempted ones included."""
        return len(self._scheduler.waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to look at."""
        return bool(self._sequences)

    def add(self, request: SimRequest) -> None:
        """Queue a request.

        Raises:
            ValueError: its id is in use, it has no tokens, or it has a priority where the policy knows none.
        """
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is already in use")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id!r} needs at least one prompt token and one output token")
        if request.priority and self.limits.policy != "priority":
            raise ValueError(f"request {request.id!r} has priority {request.priority}, but the policy is fcfs")
        self._arrivals += 1
        sequence = Sequence(request, self._arrivals)
        self._sequences[request.id] = sequence
        self._scheduler.waiting.add(sequence)

    def abort(self, request: RequestId) -> bool:
        """Drop a request wherever it is and give its blocks back. False where it is not known (any more)."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return False
        self._scheduler.drop(sequence, self._flight, self._ahead)
        self.counters.aborted += 1
        return True

    def reset(self, *, external: bool = False) -> bool:
        """Empty the cache, with `external` the memory behind it too; told to others by the next step's events.

        Refused (False) while a sequence holds blocks.
        """
        if external and self._tier is not None:
            self._tier.reset()
        return self.pool.reset()

    def step(self) -> tuple[Step, StepResult]:
        """Begin and end one step at once."""
        return self.begin(), self.end()

    def begin(self, *, names: bool = True) -> Step:
        """Start one step. It may be empty: then no request fits, and only an abort or another request can help.

        With asynchronous scheduling the step was scheduled earlier, and what is scheduled now is the one after it;
        `admitted` and `preempted` are still those of the step that starts. `names=False` leaves out the lists of all
        who compute and who get a token, which take as long as there are sequences.
        """
        assert self._flight is None, "the step before has not ended"
        flight = self._ahead or self._schedule(None, names)
        self._flight, self._ahead = flight, None
        if self.limits.async_scheduling and flight.sequences:
            ahead = self._schedule(flight, names)
            if ahead.sequences or ahead.preempted:
                self._ahead = ahead
            else:  # nothing is lost: the next step is scheduled when it begins
                self._names.pop(ahead, None)
        counts = self._names.get(flight, {})
        return Step(
            duration_fs=self.time.step_fs(flight.work) + flight.copied_blocks * self._copy_fs,
            scheduled={sequence.request.id: count for sequence, count in counts.items()},
            admitted=flight.admitted,
            preempted=tuple(flight.preempted),
            sequences=flight.sequences,
        )

    def end(self) -> StepResult:
        """Deliver the tokens of the step that began, except to sequences aborted meanwhile."""
        flight = self._flight
        assert flight is not None, "no step has begun"
        self._flight = None
        produced = tuple(
            sequence.request.id
            for sequence in self._names.pop(flight, ())
            if sequence.phase is not Phase.OVER and (flight.serves(sequence) or sequence in flight.stale)
        )
        first, finished = self._scheduler.deliver(flight)
        for request in finished:
            del self._sequences[request]
        events = self.pool.drain()
        if self._tier is not None:
            events += self._tier.drain()
        return StepResult(produced, tuple(first), tuple(finished), tuple(events))

    def idle_steps(self) -> int:
        """Return how many steps are ahead that would do nothing but decode; to be asked between two steps."""
        assert self._flight is None, "the step before has not ended"
        steps = self._scheduler.idle_steps()
        if self.limits.async_scheduling and steps:
            ahead = self._ahead
            if ahead is None or not ahead.is_idle or ahead.decodes != self._scheduler.decoding.count:
                return 0
        return steps

    def idle_fs(self, steps: int) -> int:
        """Return how long the next `steps` of the idle steps take."""
        return self.time.decode_fs(steps, self._scheduler.decoding.count, self._idle_tokens)

    @property
    def idle_load(self) -> tuple[int, int]:
        """Sequences that decode in the next idle step, and the tokens in their cache."""
        return self._scheduler.decoding.count, self._idle_tokens

    @property
    def _idle_tokens(self) -> int:
        return self._ahead.kv_tokens if self._ahead else self._scheduler.kv_tokens

    def skip(self, steps: int) -> None:
        """Perform the next `steps` of the idle steps."""
        decoding = self._scheduler.decoding.count
        self._scheduler.skip(steps)
        self.counters.generation_tokens += steps * decoding
        if self._ahead is not None:
            self._names.pop(self._ahead, None)
            flight = Flight(self._scheduler.step)
            flight.decodes = flight.producers = decoding
            flight.kv_tokens = self._ahead.kv_tokens + steps * decoding
            self._ahead = flight

    def _schedule(self, pending: Flight | None, names: bool) -> Flight:
        flight = self._scheduler.schedule(pending)
        if names:
            self._names[flight] = self._scheduler.counts(flight)
        return flight

    def __repr__(self) -> str:
        return f"<SimReplica {self.running_count} running, {self.waiting_count} waiting, {self.pool!r}>"
