"""A request inside a simulated engine, and the queues in which it waits.

A decoding sequence computes one token in every step, so nothing of it is counted up: `offset` and the number of the
step say how far it is. `pause` moves it back where a step left it out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterator
from enum import IntEnum
from typing import Protocol

from kvroute.kv.chain import blocks_in
from kvroute.kv.pool import BlockId
from kvroute.sim.values import SimRequest


class Phase(IntEnum):
    """Where a sequence is in its life."""

    WAITING = 0  # holds no blocks; new or preempted
    PREFILLING = 1  # part of its known tokens is scheduled
    DECODING = 2  # computes one token a step
    ENDING = 3  # its last token is scheduled, and not known yet
    OVER = 4  # finished or aborted


class Sequence:
    """The mutable side of a request."""

    __slots__ = (
        "arrival",
        "blocks",
        "chain_blocks",
        "computed",
        "due",
        "entered",
        "generated",
        "is_resumed",
        "last",
        "number",
        "offered_blocks",
        "offset",
        "phase",
        "request",
        "stored_blocks",
        "ticket",
    )

    def __init__(self, request: SimRequest, arrival: int) -> None:
        self.request = request
        self.arrival = arrival
        self.chain_blocks = blocks_in(request.chain)
        self.phase = Phase.WAITING
        self.blocks: list[BlockId] = []
        self.stored_blocks = 0  # leading blocks that have their hash
        self.offered_blocks = 0  # leading blocks that were offered to CPU memory, or came from there
        self.computed = 0  # tokens whose KV is in the cache; only kept while prefilling
        self.generated = 0  # tokens of the answer that are known; only kept until it decodes
        self.is_resumed = False  # it was admitted before
        self.number = 0  # of its admission: running sequences are served in this order
        self.entered = 0  # step that computed the last known token, and so produces the next one
        self.offset = 0  # computed tokens less the number of the last step, while decoding
        self.last = 0  # step that produces its last token
        self.due = 0  # next step in which more than counting is to be done for it
        self.ticket = 0  # of its entry in the scheduler's heap; all others are void

    @property
    def tokens(self) -> int:
        """Known tokens, until it decodes."""
        return self.request.prompt_tokens + self.generated

    def decode_from(self, step: int) -> None:
        """All known tokens are scheduled with this step; from the next one it computes one token each."""
        self.entered = step
        self.offset = self.computed - step
        self.last = step + self.request.output_tokens - self.generated - 1
        self.phase = Phase.ENDING if self.last == step else Phase.DECODING

    def produced_after(self, step: int) -> int:
        """Tokens of the answer once the step has delivered, for a sequence that has decoded."""
        return min(step, self.last) + self.offset - self.request.prompt_tokens + 1

    def takes_part_in(self, step: int) -> bool:
        """Whether a step that left nobody out produces a token for it."""
        return self.phase >= Phase.DECODING and self.entered <= step <= self.last

    def plan(self, step: int, block_size: int) -> int:
        """Return the first step after `step` that needs a block, fills one that has a hash, or is the last."""
        following = step + 1
        fills = following + -(following + self.offset) % block_size
        if (fills + self.offset) // block_size > self.chain_blocks:
            fills = self.last
        takes = following + -(step + self.offset) % block_size
        return min(fills, takes, self.last)

    def pause(self) -> None:
        """A step left it out."""
        self.offset -= 1
        self.last += 1

    def __repr__(self) -> str:
        return f"<Sequence {self.request.id} {self.phase.name.lower()}, {len(self.blocks)} blocks>"


class Queue(Protocol):
    """Sequences that wait for admission."""

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence."""

    def head(self) -> Sequence:
        """Return the one that is admitted next."""

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it is."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Sequence]: ...


class ByArrival:
    """First come, first served; preempted ones before all."""

    def __init__(self) -> None:
        self._items: deque[Sequence] = deque()

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        self._items.append(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Queue a preempted sequence."""
        self._items.appendleft(sequence)

    def head(self) -> Sequence:
        """Return the one that is admitted next."""
        return self._items[0]

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it is."""
        self._items.remove(sequence)

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)


class ByPriority:
    """The smallest priority value first, among equals the first that came; preempted ones get no better place."""

    def __init__(self) -> None:
        self._items: list[tuple[int, int, Sequence]] = []  # (priority, arrival) is unique, so sequences never compare

    def add(self, sequence: Sequence) -> None:
        """Queue a new request."""
        insort(self._items, self._item(sequence))

    put_back = add

    def head(self) -> Sequence:
        """Return the one that is admitted next."""
        return self._items[0][2]

    def remove(self, sequence: Sequence) -> None:
        """Take one out, wherever it is."""
        del self._items[bisect_left(self._items, self._item(sequence))]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, _, sequence in self._items)

    def _item(self, sequence: Sequence) -> tuple[int, int, Sequence]:
        return sequence.request.priority, sequence.arrival, sequence
