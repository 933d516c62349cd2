"""vLLM's scheduler over a BlockPool: which sequence computes how many tokens in a step, and with which blocks.

In order:

1. Running sequences first, in the order of their admission, each with what it still has to compute, within the budget.
2. Where blocks run out, one is preempted: the one admitted last, or under priorities the least urgent, if need be the
   one that asked. It loses its blocks (their hashes stay until they are taken), starts over, and waits in front, or in
   its place by priority. A step that preempted admits nobody.
3. Then waiting ones, while budget and `max_num_seqs` allow. One is admitted only if blocks for its *whole* prompt are
   there, though it takes only those of its first chunk. The first that does not fit stops the admission.

Blocks get their hashes when they are taken for, so a sequence that is admitted in the same step already hits them.

With asynchronous scheduling a step is scheduled while the one before still runs. Its tokens are not known then: a block
that they fill gets its hash when that step delivers, a finished sequence holds its blocks a step longer, and a sequence
that is preempted meanwhile still gets the token that was under way.

A step costs what there is to do, not what runs: decoding sequences take a block now and then and are only counted in
between. `_run_one_by_one` is the same for steps in which budget or blocks are short, one sequence after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.kv.chain import PrefixChain
from kvroute.kv.offload import OffloadTier
from kvroute.kv.pool import BlockId, BlockPool
from kvroute.sim.decoding import Decoding
from kvroute.sim.flight import Flight
from kvroute.sim.sequence import ByArrival, ByPriority, Phase, Queue, Sequence
from kvroute.sim.values import Counters, Limits, RequestId


class Scheduler:
    """Waiting and running sequences, and the blocks that they hold."""

    def __init__(self, pool: BlockPool, limits: Limits, counters: Counters, offload: OffloadTier | None = None) -> None:
        self.pool = pool
        self.offload = offload
        self.limits = limits
        self.counters = counters
        self.waiting: Queue = ByPriority() if limits.policy == "priority" else ByArrival()
        self.running: dict[Sequence, None] = {}  # in the order of admission
        self.step = 0  # number of the last step that was scheduled
        self.decoding = Decoding(pool.block_size)
        self._prefilling: dict[Sequence, None] = {}
        self._admissions = 0
        self._filled: list[tuple[PrefixChain, int, int]] = []  # blocks to offer to CPU memory, if there is any
        self._refused: tuple[Sequence, int, int, int] | None = None  # who did not fit, and under which conditions

    def schedule(self, pending: Flight | None = None) -> Flight:
        """Schedule the next step. `pending` is the one before, where its tokens are not known yet."""
        flight = Flight(self.step + 1)
        due = self.decoding.take_due(flight.step)
        budget = self._run_together(flight, due, pending)
        if budget is None:
            budget = self._run_one_by_one(flight, pending)
        if not flight.preempted:
            self._admit(flight, budget)
        self.step = flight.step
        if flight.sequences:  # an empty one may be thrown away
            flight.filled, self._filled = self._filled, []
        flight.producers = flight.decodes + sum(1 for sequence in flight.chunks if sequence.entered == flight.step)
        return flight

    def deliver(self, flight: Flight) -> tuple[list[RequestId], list[RequestId]]:
        """Hand out the tokens of a step; return who got the first one, and who the last."""
        first: list[RequestId] = []
        finished: list[RequestId] = []
        news: Iterable[Sequence] = flight.news
        if flight.stale:
            news = sorted((*flight.news, *flight.stale), key=_number)
        for sequence in news:
            if sequence.phase is Phase.OVER:
                continue
            if sequence.phase is Phase.WAITING:
                self._deliver_late(sequence, first, finished)
                continue
            self._store(sequence, flight.news[sequence])
            if sequence.entered == flight.step and not sequence.generated:
                self._begin_answer(sequence, first)
            if sequence.phase is Phase.ENDING and sequence.last == flight.step:
                self._end(sequence)
                finished.append(sequence.request.id)
        if self.offload is not None:
            for filled in flight.filled:
                self.offload.keep(*filled)
        self.counters.generation_tokens += flight.producers
        self.counters.finished += len(finished)
        return first, finished

    def counts(self, flight: Flight) -> dict[Sequence, int]:
        """List the tokens that each sequence computes in the step just scheduled, in the order of admission."""
        found: dict[Sequence, int] = {}
        for sequence in self.running:
            if sequence in flight.chunks:
                found[sequence] = flight.chunks[sequence][1]
            elif flight.serves(sequence):
                found[sequence] = 1
        return found

    def drop(self, sequence: Sequence, *flights: Flight | None) -> None:
        """Take a sequence out, wherever it is; `flights` are the steps that have not delivered yet."""
        for flight in flights:
            if flight is not None and (flight.serves(sequence) or sequence in flight.stale):
                flight.producers -= 1
        if sequence.phase is Phase.WAITING:
            self.waiting.remove(sequence)
        else:
            del self.running[sequence]
            self._prefilling.pop(sequence, None)
            if sequence.phase is Phase.DECODING:
                self.decoding.leave(sequence)
            self._give_back(sequence)
        sequence.phase = Phase.OVER

    def idle_steps(self) -> int:
        """Return how many steps from here on would do nothing but decode: take no block, store none, end nothing."""
        spare = self.limits.max_num_batched_tokens - self.decoding.count
        if self._prefilling or self._filled or not self.decoding.count or spare < 0 or self._may_admit(spare):
            return 0
        return self.decoding.next_due() - self.step - 1

    def skip(self, steps: int) -> None:
        """Schedule idle steps."""
        self.step += steps

    @property
    def kv_tokens(self) -> int:
        """Tokens in the cache of the decoding sequences."""
        return self.decoding.kv_tokens(self.step)

    def _run_together(self, flight: Flight, due: list[Sequence], pending: Flight | None) -> int | None:
        """Serve all that run where budget and blocks suffice; else do nothing and return None. Returns what is left."""
        budget = self.limits.max_num_batched_tokens - self.decoding.count
        counts = {sequence: self._chunk(sequence) for sequence in self._prefilling}
        if budget < sum(counts.values()):
            if budget < 0 or next(iter(counts)).number < self.decoding.youngest:
                return None
            counts, budget = _cut(counts, budget)
        else:
            budget -= sum(counts.values())
        size, step = self.pool.block_size, flight.step
        needed = sum(1 for sequence in due if (step - 1 + sequence.offset) % size == 0)
        needed += sum(self._missing_blocks(sequence, sequence.computed + count) for sequence, count in counts.items())
        if needed > self.pool.free_blocks:
            return None
        flight.decodes, flight.kv_tokens = self.decoding.count, self.kv_tokens
        for sequence in sorted((*due, *counts), key=_number) if counts else due:
            if sequence.phase is Phase.PREFILLING:
                self._prefill(sequence, counts[sequence], flight)
            else:
                self._grow(sequence, flight, pending)
        return budget

    def _run_one_by_one(self, flight: Flight, pending: Flight | None) -> int:
        """Serve those that run in turn, and preempt where blocks run out. Returns what is left of the budget."""
        budget = self.limits.max_num_batched_tokens
        served: dict[Sequence, int] = {}
        for sequence in list(self.running):
            if budget <= 0:
                break
            if sequence not in self.running or sequence.phase is Phase.ENDING:
                continue
            is_decoding = sequence.phase is Phase.DECODING
            computed = self.step + sequence.offset if is_decoding else sequence.computed
            count = 1 if is_decoding else min(self._chunk(sequence), budget)
            while self._missing_blocks(sequence, computed + count) > self.pool.free_blocks:
                victim = self._victim()
                budget += served.pop(victim, 0)
                self._preempt(victim, flight, pending)
                if victim is sequence:
                    break
            if sequence.phase is Phase.WAITING:
                break
            if not is_decoding:
                self._prefill(sequence, count, flight)
            elif sequence.due == flight.step:
                self._grow(sequence, flight, pending)
            served[sequence] = count
            budget -= count
        self._count_decodes(flight, served)
        return budget

    def _count_decodes(self, flight: Flight, served: dict[Sequence, int]) -> None:
        for sequence in served:
            if sequence not in flight.chunks:
                flight.decodes += 1
                flight.kv_tokens += self.step + sequence.offset
        for sequence in self.running:
            if sequence.phase is Phase.DECODING and sequence not in served:
                flight.left_out.add(sequence)
                self.decoding.pause(sequence, flight.step)

    def _admit(self, flight: Flight, budget: int) -> None:
        while self._may_admit(budget):
            sequence = self.waiting.head()
            hits = self.pool.match(sequence.request.chain, sequence.tokens) if sequence.request.reads_cache else []
            copies = self._copies(sequence, len(hits))
            hit_tokens = (len(hits) + copies) * self.pool.block_size
            count = self._chunk(sequence, hit_tokens)
            if count > budget and not self.limits.enable_chunked_prefill:
                return
            count = min(count, budget)
            if not self._fits(sequence, hits, hit_tokens + count):
                self._refused = self._conditions(budget)
                return
            self.waiting.remove(sequence)
            if not sequence.is_resumed:
                flight.admitted[sequence.request.id] = hit_tokens
            self._enter(sequence, hits, copies)
            flight.copied_blocks += copies
            self._prefill(sequence, count, flight)
            budget -= count

    def _may_admit(self, budget: int) -> bool:
        """Whether an admission is worth a try: whoever did not fit will not while nothing has changed."""
        if not self.waiting or budget <= 0 or len(self.running) >= self.limits.max_num_seqs:
            return False
        return self._refused != self._conditions(budget)

    def _conditions(self, budget: int) -> tuple[Sequence, int, int, int]:
        """All that decides whether the head of the queue fits."""
        head, changes = self.waiting.head(), self.pool.changes
        if self.limits.reserve_full_prompt:
            return head, changes, 0, 0
        return head, changes, budget, len(self.running) + len(self.waiting)

    def _fits(self, sequence: Sequence, hits: list[BlockId], chunk_end: int) -> bool:
        reserved = sequence.tokens if self.limits.reserve_full_prompt else chunk_end
        needed = self._blocks_for(reserved) - len(hits) + self.pool.unreferenced(hits)
        kept_free = int(self.limits.watermark * self.pool.num_blocks) if self.running else 0
        return needed + kept_free <= self.pool.free_blocks

    def _copies(self, sequence: Sequence, hits: int) -> int:
        """Count the blocks after those that hit that can be copied back."""
        if self.offload is None or not sequence.request.reads_cache:
            return 0
        return self.offload.match(sequence.request.chain, hits, (sequence.tokens - 1) // self.pool.block_size)

    def _enter(self, sequence: Sequence, hits: list[BlockId], copies: int) -> None:
        self._admissions += 1
        sequence.number = self._admissions
        sequence.phase = Phase.PREFILLING
        self.running[sequence] = None
        self._prefilling[sequence] = None
        self.pool.touch(hits)
        sequence.blocks = list(hits)
        sequence.stored_blocks = len(hits)
        hit_tokens = len(hits) * self.pool.block_size
        copied_tokens = copies * self.pool.block_size
        sequence.computed = hit_tokens + copied_tokens
        if copies and self.offload is not None:
            end = len(hits) + copies
            sequence.blocks += self.pool.take(copies)
            self.offload.use(sequence.request.chain, len(hits), end)
            self.pool.store(sequence.request.chain, sequence.blocks, len(hits), end)
            sequence.stored_blocks = sequence.offered_blocks = end
        is_resumed, sequence.is_resumed = sequence.is_resumed, True
        if not sequence.request.reads_cache:
            return
        if is_resumed:
            self.counters.resumed_queries += sequence.tokens
            self.counters.resumed_hits += hit_tokens
        else:
            self.counters.prefix_queries += sequence.tokens
            self.counters.prefix_hits += hit_tokens
            self.counters.external_queries += (sequence.tokens - hit_tokens) if self.offload is not None else 0
            self.counters.external_hits += copied_tokens

    def _prefill(self, sequence: Sequence, count: int, flight: Flight) -> None:
        """Compute `count` of the known tokens: take blocks for them, and name those that they fill."""
        flight.chunks[sequence] = (sequence.computed, count)
        end = sequence.computed + count
        sequence.blocks += self.pool.take(self._missing_blocks(sequence, end))
        self._store(sequence, end // self.pool.block_size)
        sequence.computed = end
        if end < sequence.tokens:
            return
        del self._prefilling[sequence]
        sequence.decode_from(flight.step)
        flight.news[sequence] = 0
        if sequence.phase is Phase.DECODING:
            self.decoding.enter(sequence, flight.step)

    def _grow(self, sequence: Sequence, flight: Flight, pending: Flight | None) -> None:
        """Compute a token that is more than counted: it needs a block, fills one, or is the last."""
        end = flight.step + sequence.offset
        sequence.blocks += self.pool.take(self._missing_blocks(sequence, end))
        self._store(
            sequence, (end - 1) // self.pool.block_size
        )  # what the step before fills, if that was not known yet
        full = end // self.pool.block_size if end % self.pool.block_size == 0 else 0
        if full and not (pending is not None and pending.serves(sequence)):  # the token that it computes is known
            self._store(sequence, full)
            full = 0
        if sequence.last == flight.step:
            sequence.phase = Phase.ENDING
            self.decoding.leave(sequence)
        else:
            self.decoding.wait(sequence, flight.step)
        if full or sequence.phase is Phase.ENDING:
            flight.news[sequence] = full

    def _store(self, sequence: Sequence, full_blocks: int) -> None:
        full_blocks = min(full_blocks, sequence.chain_blocks)
        if self.offload is not None and sequence.offered_blocks < full_blocks:
            self._filled.append((sequence.request.chain, sequence.offered_blocks, full_blocks))
            sequence.offered_blocks = full_blocks
        self.pool.store(sequence.request.chain, sequence.blocks, sequence.stored_blocks, full_blocks)
        sequence.stored_blocks = max(sequence.stored_blocks, full_blocks)

    def _victim(self) -> Sequence:
        if self.limits.policy == "fcfs":
            return next(reversed(self.running))
        return max(self.running, key=lambda sequence: (sequence.request.priority, sequence.arrival))

    def _preempt(self, sequence: Sequence, flight: Flight, pending: Flight | None) -> None:
        is_under_way = pending is not None and pending.serves(sequence)
        if sequence.phase >= Phase.DECODING:
            sequence.generated = sequence.produced_after(self.step) - is_under_way
        if sequence.phase is Phase.DECODING:
            self.decoding.leave(sequence)
        if is_under_way and pending is not None:
            pending.stale.append(sequence)
            pending.news.pop(sequence, None)
        flight.chunks.pop(sequence, None)
        flight.news.pop(sequence, None)
        flight.preempted.append(sequence.request.id)
        del self.running[sequence]
        self._prefilling.pop(sequence, None)
        self._give_back(sequence)
        sequence.computed = 0
        sequence.phase = Phase.WAITING
        self.waiting.put_back(sequence)
        self.counters.preemptions += 1

    def _begin_answer(self, sequence: Sequence, first: list[RequestId]) -> None:
        first.append(sequence.request.id)
        sequence.generated = 1
        self.counters.prompt_tokens += sequence.request.prompt_tokens

    def _deliver_late(self, sequence: Sequence, first: list[RequestId], finished: list[RequestId]) -> None:
        if sequence.generated:
            sequence.generated += 1
        else:
            self._begin_answer(sequence, first)
        if sequence.generated == sequence.request.output_tokens:
            self.waiting.remove(sequence)
            sequence.phase = Phase.OVER
            finished.append(sequence.request.id)

    def _end(self, sequence: Sequence) -> None:
        del self.running[sequence]
        self._give_back(sequence)
        sequence.phase = Phase.OVER

    def _give_back(self, sequence: Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        sequence.stored_blocks = 0

    def _chunk(self, sequence: Sequence, hit_tokens: int = 0) -> int:
        """Return the known tokens that a sequence would compute now if the budget had no end."""
        missing = sequence.tokens - max(sequence.computed, hit_tokens)
        threshold = self.limits.long_prefill_token_threshold
        if threshold and len(self.running) + len(self.waiting) > 1:
            return min(missing, threshold)
        return missing

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def _missing_blocks(self, sequence: Sequence, end: int) -> int:
        return max(0, self._blocks_for(end) - len(sequence.blocks))


def _number(sequence: Sequence) -> int:
    return sequence.number


def _cut(counts: dict[Sequence, int], budget: int) -> tuple[dict[Sequence, int], int]:
    """Give each its share until the budget is used up."""
    cut: dict[Sequence, int] = {}
    for sequence, count in counts.items():
        if not budget:
            break
        cut[sequence] = min(count, budget)
        budget -= cut[sequence]
    return cut, budget
