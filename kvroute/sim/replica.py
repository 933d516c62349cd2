"""One simulated engine: vLLM's scheduler over a BlockPool, without clock, tokens or I/O.

A step has two halves, because time passes between them. `begin` schedules: it decides which sequence computes how many
tokens, takes blocks for them and says how long that lasts. `end` delivers: every sequence that is wholly computed gets
its next token, and those that have their last one leave. `step` is both, for callers without a clock.

Scheduling, in order:

1. Running sequences first, in the order of their admission, each with what it still has to compute, within the budget.
2. Where blocks run out, the sequence admitted last is preempted: it loses its blocks (their hashes stay until they are
   taken), starts over, and waits at the front. A step that preempted admits nobody.
3. Then waiting ones, first come first served, while budget and `max_num_seqs` allow. One is admitted only if blocks for
   its *whole* prompt are there, though it takes only those of its first chunk. The first that does not fit stops the
   admission: those behind it wait too.

Blocks get their hashes when they are taken for, so a sequence that is admitted in the same step already hits them.

A request comes with the chain of prompt *and* answer: a simulated engine knows what it will say. Priorities,
asynchronous scheduling, adapters and speculative decoding are not modelled.
"""

from __future__ import annotations

from collections import deque
from typing import NewType

from msgspec import Struct

from kvroute.kv.chain import PrefixChain, blocks_in
from kvroute.kv.pool import BlockId, BlockPool, CacheEvent
from kvroute.sim.engine import StepTime, StepWork, default_time, seconds

RequestId = NewType("RequestId", str)


class SimRequest(Struct, frozen=True):
    """One sequence to generate."""

    id: RequestId
    chain: PrefixChain  # block hashes of the prompt and the answer; blocks past its end are never cached
    prompt_tokens: int
    output_tokens: int  # length of the answer, at least 1


class Limits(Struct, frozen=True, kw_only=True):
    """The scheduler's settings, under vLLM's names, with the defaults of its server on a large accelerator."""

    max_num_batched_tokens: int = 8192  # tokens that a step computes at most
    max_num_seqs: int = 1024  # sequences that run at once
    long_prefill_token_threshold: int = 0  # prompt tokens a sequence computes in a step it shares; 0 = no bound
    reserve_full_prompt: bool = True  # admission needs blocks for the whole prompt (scheduler_reserve_full_isl)
    watermark: float = 0.0  # share of the blocks that an admission leaves free while others are scheduled


class Step(Struct, frozen=True):
    """The first half of a step: what was scheduled."""

    duration_fs: int  # femtoseconds
    scheduled: dict[RequestId, int]  # tokens that each sequence computes
    admitted: dict[
        RequestId, int
    ]  # sequences admitted for the first time, and the prompt tokens that each found cached
    preempted: tuple[RequestId, ...]

    @property
    def duration_s(self) -> float:
        """Seconds that the step takes."""
        return seconds(self.duration_fs)


class StepResult(Struct, frozen=True):
    """The second half: what came of it."""

    produced: tuple[RequestId, ...]  # sequences that got one token each
    finished: tuple[RequestId, ...]  # those among them for which it was the last
    events: tuple[CacheEvent, ...]  # what happened in the cache since the step before


class Counters(Struct):
    """Totals since the start, in tokens where not said otherwise. Resumed sequences have their own pair."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    preemptions: int = 0  # times
    prompt_tokens: int = 0  # of sequences whose prompt was computed
    generation_tokens: int = 0
    finished: int = 0  # sequences
    aborted: int = 0  # sequences


class _Sequence:
    """The mutable side of a request."""

    __slots__ = ("blocks", "computed", "generated", "is_resumed", "request", "stored_blocks")

    def __init__(self, request: SimRequest) -> None:
        self.request = request
        self.blocks: list[BlockId] = []
        self.stored_blocks = 0  # leading blocks that have their hash
        self.computed = 0  # tokens whose KV is in the cache
        self.generated = 0
        self.is_resumed = False  # it was admitted before

    @property
    def tokens(self) -> int:
        return self.request.prompt_tokens + self.generated


class SimReplica:
    """A continuous-batching engine with a paged prefix cache."""

    def __init__(self, pool: BlockPool, limits: Limits | None = None, time: StepTime | None = None) -> None:
        self.pool = pool
        self.limits = limits or Limits()
        self.time = time or default_time()
        self.counters = Counters()
        self._sequences: dict[RequestId, _Sequence] = {}
        self._running: list[_Sequence] = []
        self._waiting: deque[_Sequence] = deque()
        self._scheduled: list[_Sequence] | None = None  # between `begin` and `end`

    @property
    def running(self) -> tuple[RequestId, ...]:
        """Admitted sequences, oldest admission first."""
        return tuple(sequence.request.id for sequence in self._running)

    @property
    def waiting(self) -> tuple[RequestId, ...]:
        """Sequences without blocks, in the order in which they will be admitted."""
        return tuple(sequence.request.id for sequence in self._waiting)

    @property
    def running_count(self) -> int:
        """How many sequences are admitted."""
        return len(self._running)

    @property
    def waiting_count(self) -> int:
        """How many sequences wait, preempted ones included."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether a step would have anything to look at."""
        return bool(self._sequences)

    def add(self, request: SimRequest) -> None:
        """Queue a request."""
        if request.id in self._sequences:
            raise ValueError(f"request id {request.id!r} is already in use")
        if request.prompt_tokens < 1 or request.output_tokens < 1:
            raise ValueError(f"request {request.id!r} needs at least one prompt token and one output token")
        sequence = _Sequence(request)
        self._sequences[request.id] = sequence
        self._waiting.append(sequence)

    def abort(self, request: RequestId) -> bool:
        """Drop a request wherever it is and give its blocks back. False where it is not known (any more)."""
        sequence = self._sequences.pop(request, None)
        if sequence is None:
            return False
        if sequence in self._running:
            self._running.remove(sequence)
        else:
            self._waiting.remove(sequence)
        self._give_back(sequence)
        self.counters.aborted += 1
        return True

    def step(self) -> tuple[Step, StepResult]:
        """Begin and end one step at once."""
        return self.begin(), self.end()

    def begin(self) -> Step:
        """Schedule one step. Nothing may be scheduled: then no request fits, and only an abort can help."""
        assert self._scheduled is None, "the step before has not ended"
        batch: dict[RequestId, int] = {}
        admitted: dict[RequestId, int] = {}
        preempted: list[RequestId] = []
        budget = self._schedule_running(batch, preempted)
        if not preempted:
            self._admit_waiting(batch, admitted, budget)
        self._scheduled = [self._sequences[request] for request in batch]
        work = self._work_of(batch)
        for sequence in self._scheduled:
            sequence.computed += batch[sequence.request.id]
        return Step(self.time.step_fs(work), batch, admitted, tuple(preempted))

    def end(self) -> StepResult:
        """Deliver the tokens of the step that `begin` scheduled, except to sequences aborted meanwhile."""
        assert self._scheduled is not None, "no step has begun"
        produced: list[RequestId] = []
        finished: list[RequestId] = []
        for sequence in self._scheduled:
            request = sequence.request
            if self._sequences.get(request.id) is not sequence or sequence.computed < sequence.tokens:
                continue
            self._produce(sequence)
            produced.append(request.id)
            if sequence.generated == request.output_tokens:
                self._finish(sequence)
                finished.append(request.id)
        self._scheduled = None
        return StepResult(tuple(produced), tuple(finished), tuple(self.pool.drain()))

    def _schedule_running(self, batch: dict[RequestId, int], preempted: list[RequestId]) -> int:
        budget = self.limits.max_num_batched_tokens
        position = 0
        while position < len(self._running) and budget > 0:
            sequence = self._running[position]
            count = min(self._chunk(sequence), budget)
            while not self._has_room(sequence, count):
                victim = self._running.pop()
                self._preempt(victim)
                preempted.append(victim.request.id)
                if victim is sequence:
                    return budget
            self._extend(sequence, count)
            batch[sequence.request.id] = count
            budget -= count
            position += 1
        return budget

    def _admit_waiting(self, batch: dict[RequestId, int], admitted: dict[RequestId, int], budget: int) -> None:
        while self._waiting and budget > 0 and len(self._running) < self.limits.max_num_seqs:
            sequence = self._waiting[0]
            hits = self.pool.match(sequence.request.chain, sequence.tokens)
            hit_tokens = len(hits) * self.pool.block_size
            count = min(self._chunk(sequence, hit_tokens), budget)
            if not self._may_enter(sequence, hits, hit_tokens + count, is_alone=not batch):
                return
            self._waiting.popleft()
            self._running.append(sequence)
            if not sequence.is_resumed:
                admitted[sequence.request.id] = hit_tokens
            self._enter(sequence, hits, hit_tokens)
            self._extend(sequence, count)
            batch[sequence.request.id] = count
            budget -= count

    def _chunk(self, sequence: _Sequence, hit_tokens: int = 0) -> int:
        """Return the tokens that a sequence would compute now if the budget had no end."""
        missing = sequence.tokens - max(sequence.computed, hit_tokens)
        threshold = self.limits.long_prefill_token_threshold
        if threshold and len(self._sequences) > 1:
            return min(missing, threshold)
        return missing

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _has_room(self, sequence: _Sequence, count: int) -> bool:
        return self._blocks_for(sequence.computed + count) - len(sequence.blocks) <= self.pool.free_blocks

    def _may_enter(self, sequence: _Sequence, hits: list[BlockId], chunk_end: int, *, is_alone: bool) -> bool:
        reserved = sequence.tokens if self.limits.reserve_full_prompt else chunk_end
        needed = self._blocks_for(reserved) - len(hits) + self.pool.unreferenced(hits)
        kept_free = 0 if is_alone else int(self.limits.watermark * self.pool.num_blocks)
        return needed + kept_free <= self.pool.free_blocks

    def _enter(self, sequence: _Sequence, hits: list[BlockId], hit_tokens: int) -> None:
        self.pool.touch(hits)
        sequence.blocks = list(hits)
        sequence.stored_blocks = len(hits)
        sequence.computed = hit_tokens
        if sequence.is_resumed:
            self.counters.resumed_queries += sequence.tokens
            self.counters.resumed_hits += hit_tokens
        else:
            self.counters.prefix_queries += sequence.tokens
            self.counters.prefix_hits += hit_tokens
            sequence.is_resumed = True

    def _extend(self, sequence: _Sequence, count: int) -> None:
        """Take the blocks for `count` more tokens, and name those that they fill."""
        end = sequence.computed + count
        sequence.blocks += self.pool.take(max(0, self._blocks_for(end) - len(sequence.blocks)))
        full = min(end // self.pool.block_size, blocks_in(sequence.request.chain))
        self.pool.store(sequence.request.chain, sequence.blocks, sequence.stored_blocks, full)
        sequence.stored_blocks = max(sequence.stored_blocks, full)

    def _preempt(self, sequence: _Sequence) -> None:
        self._give_back(sequence)
        sequence.computed = 0
        self._waiting.appendleft(sequence)
        self.counters.preemptions += 1

    def _produce(self, sequence: _Sequence) -> None:
        if not sequence.generated:
            self.counters.prompt_tokens += sequence.request.prompt_tokens
        sequence.generated += 1
        self.counters.generation_tokens += 1

    def _finish(self, sequence: _Sequence) -> None:
        self._running.remove(sequence)
        del self._sequences[sequence.request.id]
        self._give_back(sequence)
        self.counters.finished += 1

    def _give_back(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_blocks = 0

    def _work_of(self, batch: dict[RequestId, int]) -> StepWork:
        """Sum up a batch. A sequence that has answered already and computes one token decodes; all others prefill."""
        prefills: list[tuple[int, int]] = []
        decodes = kv_tokens = 0
        for request, count in batch.items():
            sequence = self._sequences[request]
            if sequence.generated and count == 1:
                decodes += 1
                kv_tokens += sequence.computed
            else:
                prefills.append((sequence.computed, count))
        return StepWork(prefills=tuple(prefills), decodes=decodes, kv_tokens=kv_tokens)

    def __repr__(self) -> str:
        return f"<SimReplica {len(self._running)} running, {len(self._waiting)} waiting, {self.pool!r}>"
