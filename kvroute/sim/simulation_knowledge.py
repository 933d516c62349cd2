"""What routers know of the engines' caches, as maps from blocks to replicas.

`Holders` is the exact map: a bit a replica for every block, so that one walk along a chain finds the depth of all
replicas at once. `ExactView` feeds it with the engines' events and with what was sent and is not computed yet;
`SentView` needs no events: it concludes from what was sent, with the bounds and the order of eviction of the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from kvroute.kv.chain import HASH_BYTES, PrefixChain, hashes_of
from kvroute.kv.pool import CacheEvent, Removed, Stored
from kvroute.kv.residency import Residency
from kvroute.routing.replica import Holding, ReplicaId

HISTORY_REQUESTS = 50_000  # of a generation


class Knowledge(Protocol):
    """Who holds what, as a router knows it."""

    def join(self, number: int, capacity_blocks: int) -> None:
        """Admit a replica, empty."""

    def holding(self, chain: PrefixChain) -> Holding:
        """Return the leading blocks that each replica holds."""

    def sent(self, number: int, chain: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt was sent; its first blocks were known to be there."""

    def answered(self, number: int, prompt: PrefixChain, known_blocks: int, chain: PrefixChain) -> None:
        """Note that a prompt was computed, and with `chain` what its answer will leave there."""

    def failed(self, number: int, prompt: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt was not computed after all."""

    def happened(self, number: int, events: Iterable[CacheEvent]) -> None:
        """Take in what happened in an engine's cache."""


class Holders:
    """Block -> replicas, as bits, with a count where one replica has it more than once. Bounded by what it is fed."""

    def __init__(self) -> None:
        self.masks: dict[int, int] = {}
        self._more: dict[tuple[int, int], int] = {}  # (bit, block) -> copies beyond the first

    def add(self, bit: int, blocks: Iterable[int]) -> None:
        """Count one more copy of every block."""
        masks = self.masks
        for block in blocks:
            mask = masks.get(block, 0)
            if mask & bit:
                self._more[bit, block] = self._more.get((bit, block), 0) + 1
            else:
                masks[block] = mask | bit

    def remove(self, bit: int, blocks: Iterable[int]) -> None:
        """Count one copy less; of a block that is not known there nothing changes."""
        masks, more = self.masks, self._more
        for block in blocks:
            key = (bit, block)
            if more and key in more:
                more[key] -= 1
                if not more[key]:
                    del more[key]
                continue
            mask = masks.get(block, 0) & ~bit
            if mask:
                masks[block] = mask
            else:
                masks.pop(block, None)

    def forget(self, bit: int) -> None:
        """Drop everything that a replica had."""
        kept = ((block, mask & ~bit) for block, mask in self.masks.items())
        self.masks = {block: mask for block, mask in kept if mask}
        self._more = {key: count for key, count in self._more.items() if key[0] != bit}


class ExactView:
    """Knowledge from events."""

    def __init__(self, ids: Sequence[ReplicaId]) -> None:
        self._ids = ids
        self._held = Holders()
        self._coming = Holders()

    def join(self, number: int, capacity_blocks: int) -> None:
        """Admit a replica, empty."""
        self._held.forget(1 << number)
        self._coming.forget(1 << number)

    def holding(self, chain: PrefixChain) -> Holding:
        """Return the leading blocks that each replica holds, or will once it has computed what was sent there."""
        found: dict[ReplicaId, int] = {}
        held, coming = self._held.masks, self._coming.masks
        alive, depth = -1, 0
        for block in hashes_of(chain):
            mask = held.get(block, 0)
            if coming:
                mask |= coming.get(block, 0)
            now = alive & mask
            if now != alive:
                if depth:
                    self._note(found, alive & ~now, depth)
                alive = now
                if not now:
                    return found
            depth += 1
        if depth:
            self._note(found, alive, depth)
        return found

    def sent(self, number: int, chain: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt was sent."""
        self._coming.add(1 << number, hashes_of(chain)[known_blocks:])

    def answered(self, number: int, prompt: PrefixChain, known_blocks: int, chain: PrefixChain) -> None:
        """Note that a prompt was computed: from now on events tell of it."""
        self._coming.remove(1 << number, hashes_of(prompt)[known_blocks:])

    def failed(self, number: int, prompt: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt will not be computed."""
        self._coming.remove(1 << number, hashes_of(prompt)[known_blocks:])

    def happened(self, number: int, events: Iterable[CacheEvent]) -> None:
        """Take in what happened in an engine's cache."""
        bit = 1 << number
        gone: list[int] = []  # removed one after the other: taken in at once
        for event in events:
            if type(event) is Removed:
                gone.append(event.hash)
                continue
            if gone:
                self._held.remove(bit, gone)
                gone = []
            if isinstance(event, Stored):
                self._held.add(bit, event.hashes)
            else:
                self._held.forget(bit)
        self._held.remove(bit, gone)

    def _note(self, found: dict[ReplicaId, int], mask: int, depth: int) -> None:
        while mask:
            bit = mask & -mask
            found[self._ids[bit.bit_length() - 1]] = depth
            mask ^= bit


class SentView:
    """Knowledge from what was sent."""

    def __init__(self, ids: Sequence[ReplicaId]) -> None:
        self._ids = ids
        self._replicas: dict[int, Residency] = {}

    def join(self, number: int, capacity_blocks: int) -> None:
        """Admit a replica, empty."""
        self._replicas[number] = Residency(capacity_blocks)

    def holding(self, chain: PrefixChain) -> Holding:
        """Return the leading blocks that each replica should hold."""
        held = ((self._ids[number], residency.held(chain)) for number, residency in self._replicas.items())
        return {id: blocks for id, blocks in held if blocks}

    def sent(self, number: int, chain: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt was sent."""
        self._replicas[number].record(chain)

    def answered(self, number: int, prompt: PrefixChain, known_blocks: int, chain: PrefixChain) -> None:
        """Note that prompt and answer are there."""
        self._replicas[number].record(chain)

    def failed(self, number: int, prompt: PrefixChain, known_blocks: int) -> None:
        """Note that a prompt will not be computed."""
        self._replicas[number].correct(prompt, known_blocks)

    def happened(self, number: int, events: Iterable[CacheEvent]) -> None:
        """Events are not heard."""


class History:
    """What a prompt could have hit: in one cache of (nearly) unlimited size, or in one replica's own that never evicts.

    Bounded in blocks and in requests: two generations, of which the older is forgotten when the younger is full.
    """

    def __init__(self, limit_blocks: int, limit_requests: int = HISTORY_REQUESTS) -> None:
        self._limit_blocks = limit_blocks
        self._limit_requests = limit_requests
        self._young = self._old = Residency(limit_blocks)
        self._requests = 0  # that the young one has taken in

    def see(self, prompt: PrefixChain, chain: PrefixChain) -> int:
        """Return how many of a prompt's blocks were there before, and take in the chain of prompt and answer."""
        if self._requests >= self._limit_requests:
            self._old, self._young, self._requests = self._young, Residency(self._limit_blocks), 0
        self._requests += 1
        held = self._young.record(chain).held
        blocks = len(prompt) // HASH_BYTES
        if held < blocks and self._old is not self._young:
            held = max(held, self._old.held(prompt))
        return min(held, blocks)
