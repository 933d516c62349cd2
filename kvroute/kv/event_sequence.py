"""The order of one engine's event batches: what is new, what is a repeat, what is missing, and when a new life began.

An engine numbers its batches from 0 and keeps the last ones for replay. Batches come live, one by one, and may be lost;
a replay gives all that the engine still keeps from a number on. This file decides what to hand on and when to ask.

Rule 1. A batch is handed on once, in order: no number twice in one life, and no hole that is not told. One that could
        not be taken in is a hole, too.
Rule 2. A hole, and every new connection, is settled by a replay from the last number seen, inclusive. The engine always
        keeps its newest batch: an answer without that number means a new life, or that the buffer has moved on.
Rule 3. The batch under the last number seen must be the same, byte for byte. Another one means a new life, even where
        the new engine has counted further than the old one.
Rule 4. A new life is taken from 0. What its buffer no longer holds is a gap.
Rule 5. Where no replay can be had, a hole is told as a gap, a number that was used before means a new life, and after a
        new connection a gap is told even if the numbers fit: `gap(n, n)` with the last number seen says that the batch
        under it may belong to an earlier life.
Rule 6. While a replay is under way live batches are held back, up to HELD_LIMIT. Those that came before it was asked
        for are in its answer, or stale; the others are handed on after it, one by one (`step`).

No sockets and no clock here: `EventSequence` is told what came and says what it wants.
Numbers, frames and replay are those of vLLM's ZmqEventPublisher (vllm/distributed/kv_events.py).
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

from msgspec import Struct
from xxhash import xxh3_64_intdigest

HELD_LIMIT = 4096  # live batches held back during a replay
HELD_BYTES = 64 * 1024 * 1024  # and their bytes
REMEMBERED = 4096  # batches whose digests are kept, to tell a repeat from a new life
ATTEMPTS = 3  # replays in a row that bring nothing, before it is done without


class Position(Struct, frozen=True):
    """Where a stream was read to: what to resume from."""

    seq: int
    digest: int  # of the batch under that number


class EventSink(Protocol):
    """Takes what a stream says, in order. Called on the event loop: it must not block and should not fail; a batch that
    it does fail on is lost, and told as a gap."""

    def batch(self, seq: int, payload: bytes) -> None:
        """Take the next batch, encoded as the engine sent it."""

    def new_life(self) -> None:
        """Forget everything: the engine restarted, and what follows begins with its number 0 or with a gap."""

    def gap(self, first: int, last: int) -> None:
        """Learn that the batches `first` to `last` are lost for good: what is known may be wrong."""


class SequenceCounters(Struct):
    """Totals since the start."""

    delivered: int = 0  # batches handed on
    duplicates: int = 0  # batches that had been handed on before
    gaps: int = 0  # holes that could not be filled
    new_lives: int = 0
    replays: int = 0  # times that a replay was asked for
    failed_replays: int = 0  # times that it was done without, after ATTEMPTS
    overflows: int = 0  # times that more came during a replay than is held back


def digest_of(payload: bytes) -> int:
    """Return what a batch is recognised by: 64 bits over its bytes, which include the time it was made."""
    return xxh3_64_intdigest(payload)


class EventSequence:
    """The reading position in one engine's stream, and what is open about it."""

    def __init__(self, sink: EventSink, *, can_replay: bool, position: Position | None = None) -> None:
        self.counters = SequenceCounters()
        self._sink = sink
        self._can_replay = can_replay
        self._position: Position | None = None
        self._digests: deque[int] = deque(maxlen=REMEMBERED)  # of the batches up to the position
        self._is_unsure = False  # a new connection was made, and nothing has shown yet that it is the same life
        self._held: deque[tuple[int, bytes]] = deque()
        self._held_bytes = 0
        self._does_without = False  # what is held back is handed on although replays brought nothing
        self._is_asking = False  # a replay is wanted or under way
        self._failures = 0
        self._answer: _Answer | None = None  # the replay under way
        self._go_to(position)

    @property
    def position(self) -> Position | None:
        """The last batch that was handed on; None where none was in this life."""
        return self._position

    @property
    def wanted(self) -> int | None:
        """The number that a replay should be asked from; None where none is wanted or one is under way."""
        if not self._is_asking or self._answer is not None:
            return None
        return self._position.seq if self._position else 0

    @property
    def is_asking(self) -> bool:
        """Whether a replay is wanted or under way; live batches are held back until it is over."""
        return self._is_asking

    @property
    def is_behind(self) -> bool:
        """Whether a replay is over and live batches are still held back: `step` hands them on."""
        return bool(self._held) and not self._is_asking

    @property
    def is_answer_useless(self) -> bool:
        """Whether the replay under way will not be looked at any further, so that it may be abandoned."""
        return self._answer is not None and self._answer.is_over

    def rewind(self, position: Position | None) -> None:
        """Go back to a position, because what came after it was lost further on. The sink must not call this."""
        self._go_to(position)
        self.connected()

    def connected(self) -> None:
        """Learn that a connection was made: batches may have been missed, and the engine may be another one.

        What came at about the same time may be from before or after it. With replay it is told after this call, and the
        replay decides; without, before, and the next batch shows that it cannot be vouched for.
        """
        self._failures = 0
        self._is_unsure = self._position is not None
        if self._answer is not None:
            self._answer.is_over = self._answer.has_brought = True
        self.check()

    def check(self) -> None:
        """Ask for a replay where one can be had: it finds lost batches that no later one has shown to be missing."""
        self._is_asking = self._can_replay
        self._does_without = False

    def live(self, seq: int, payload: bytes) -> None:
        """Take a batch from the live stream."""
        if self._is_asking or self._held:
            self._hold(seq, payload)
        else:
            self._take(seq, payload, may_ask=self._can_replay)

    def step(self) -> None:
        """Hand on the first of the batches that are held back, where `is_behind`."""
        seq, payload = self._held.popleft()
        self._held_bytes -= len(payload)
        self._take(seq, payload, may_ask=not self._does_without)
        self._does_without = self._does_without and self.is_behind

    def ask(self) -> int:
        """Begin a replay, and return the number to ask from. `answered` must follow, whatever happens."""
        start = self.wanted
        assert start is not None, "no replay is wanted"
        self.counters.replays += 1
        self._answer = _Answer(stale=len(self._held), is_last=self._failures == ATTEMPTS - 1)
        return start

    def replayed(self, seq: int, payload: bytes) -> bool:
        """Take a batch from the replay under way. False: the rest of it is not needed."""
        answer = self._answer
        assert answer is not None, "no replay is under way"
        if answer.is_over:
            return False
        if not answer.has_begun:
            return self._begin_answer(answer, seq, payload)
        if seq > self._expected:
            if not answer.is_last:  # the replay itself lost some: ask again from here
                answer.is_over = True
                return False
            self._deliver_after_gap(seq, payload)
        elif seq == self._expected:
            answer.has_brought = True
            self._deliver(seq, payload)
        return True

    def answered(self, *, is_complete: bool) -> None:
        """Learn that the replay under way has ended; `is_complete` means with its end mark."""
        answer, self._answer = self._answer, None
        assert answer is not None, "no replay is under way"
        if is_complete and not answer.is_over:
            if not answer.has_begun and self._position is not None:
                self._begin_life()  # it has not counted so far as the engine that we knew: ask again, from 0
            else:
                self._settle(answer.stale)
        elif answer.has_brought:
            self._failures = 0
        else:
            self._failures += 1
            if self._failures == ATTEMPTS:
                self._do_without()

    @property
    def _expected(self) -> int:
        return self._position.seq + 1 if self._position else 0

    def _take(self, seq: int, payload: bytes, *, may_ask: bool) -> None:
        if seq < self._expected:
            self._take_used_number(seq, payload, may_ask=may_ask)
        elif seq == self._expected and not self._is_unsure:
            self._deliver(seq, payload)
        elif may_ask:
            self._ask_with(seq, payload)
        else:
            self._deliver_after_gap(seq, payload)

    def _take_used_number(self, seq: int, payload: bytes, *, may_ask: bool) -> None:
        age = self._expected - seq  # 1 = the newest
        known = self._digests[-age] if age <= len(self._digests) else None
        if known == digest_of(payload):
            self.counters.duplicates += 1
        elif known is None and may_ask:
            self._ask_with(seq, payload)
        else:
            self._begin_life()
            self._take(seq, payload, may_ask=may_ask)

    def _ask_with(self, seq: int, payload: bytes) -> None:
        self._is_asking = True
        self._hold(seq, payload)

    def _begin_answer(self, answer: _Answer, seq: int, payload: bytes) -> bool:
        position = self._position
        if position is not None and seq < position.seq:
            return True  # nobody asked for it
        answer.has_begun = True
        if position is not None and seq == position.seq:
            if digest_of(payload) == position.digest:
                self._is_unsure = False
                return True
            self._begin_life()
            answer.is_over = answer.has_brought = True
            return False
        answer.has_brought = True
        if seq > 0:
            self._deliver_after_gap(seq, payload)
        else:
            self._deliver(seq, payload)
        return True

    def _settle(self, stale: int) -> None:
        """Go back to live, with what came after the replay was asked for."""
        self._is_asking = self._is_unsure = False
        self._failures = 0
        for _ in range(stale):
            _, payload = self._held.popleft()
            self._held_bytes -= len(payload)

    def _do_without(self) -> None:
        """Go back to live without an answer: what is missing becomes a gap."""
        self.counters.failed_replays += 1
        self._is_asking = False
        self._failures = 0
        self._does_without = bool(self._held)

    def _deliver(self, seq: int, payload: bytes) -> None:
        digest = digest_of(payload)
        self._position = Position(seq, digest)
        self._digests.append(digest)
        try:
            self._sink.batch(seq, payload)
        except Exception:  # it may have been taken in half, so that it cannot be handed on again
            self.counters.gaps += 1
            self._sink.gap(seq, seq)
            raise
        self.counters.delivered += 1

    def _deliver_after_gap(self, seq: int, payload: bytes) -> None:
        """Hand on a batch although what lies before it is missing, or cannot be vouched for."""
        first = min(self._expected, seq - 1)
        self._is_unsure = False
        self._digests.clear()
        self.counters.gaps += 1
        self._sink.gap(first, seq - 1)
        self._deliver(seq, payload)

    def _begin_life(self) -> None:
        self._position = None
        self._digests.clear()
        self._is_unsure = False
        self.counters.new_lives += 1
        self._sink.new_life()

    def _go_to(self, position: Position | None) -> None:
        self._position = position
        self._is_unsure = position is not None
        self._digests.clear()
        if position is not None:
            self._digests.append(position.digest)

    def _hold(self, seq: int, payload: bytes) -> None:
        if len(self._held) >= HELD_LIMIT or self._held_bytes + len(payload) > HELD_BYTES:
            self.counters.overflows += 1
            self._held.clear()  # the batch that is held next shows that these are missing
            self._held_bytes = 0
            if self._answer is not None:
                self._answer.stale = 0
        self._held.append((seq, payload))
        self._held_bytes += len(payload)


class _Answer:
    """One replay under way."""

    __slots__ = ("has_begun", "has_brought", "is_last", "is_over", "stale")

    def __init__(self, *, stale: int, is_last: bool) -> None:
        self.stale = stale  # leading held batches that came before it was asked for
        self.is_last = is_last  # the last attempt: holes in it are told instead of asked for again
        self.has_begun = False  # a batch of it was looked at
        self.has_brought = False  # it changed something, so that asking again will go further
        self.is_over = False  # the rest of it is not needed
