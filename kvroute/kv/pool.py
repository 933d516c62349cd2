"""The paged KV cache of one engine: physical blocks, who holds them, and in which order they die.

The rules are vLLM's, so that a simulated replica hits and evicts where a real one does:

Rule 1. Block 0 is the null block and is never handed out: of `num_blocks`, one less is usable.
Rule 2. Free blocks form a queue. Blocks are taken from its head; a block that is taken loses its hash (it is evicted).
Rule 3. Blocks are given back tail first, so that a chain's tail dies before its head. A block with a hash goes to the
        end of the queue, one without to its front: it can serve nobody.
Rule 4. A block with a hash that nobody references counts as free and still serves hits. A hit unlinks it.
Rule 5. One hash may lie in several blocks (the same prompt computed twice). The oldest copy serves; each copy is
        announced when it is stored and again when it is removed.
Rule 6. The last token of a prompt is always computed, so a prompt of exactly k blocks hits at most k - 1.

This file knows no request, no token id and no time. What changed is appended to a list that the caller drains.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, NewType

from msgspec import Struct

from kvroute.kv.chain import BlockHash, PrefixChain, hashes_of

BlockId = NewType("BlockId", int)  # number of a physical block, 1 to num_blocks - 1
Medium = Literal["GPU", "CPU"]  # where a block lies: in the engine's own cache, or in the memory behind it


class Stored(Struct, frozen=True):
    """Blocks that can serve hits from now on, in chain order."""

    hashes: tuple[BlockHash, ...]
    parent: BlockHash | None  # hash of the block before the first one; None at the start of a chain
    medium: Medium = "GPU"


class Removed(Struct, frozen=True):
    """One block was evicted. Another copy of the same hash may still be there."""

    hash: BlockHash
    medium: Medium = "GPU"


class Cleared(Struct, frozen=True):
    """The cache was emptied on command."""


CacheEvent = Stored | Removed | Cleared


class BlockPool:
    """Physical blocks with reference counts, an eviction queue and an index from hash to blocks."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 2:
            raise ValueError(f"num_blocks must be at least 2 (one of them is never usable), got {num_blocks}")
        if block_size < 1:
            raise ValueError(f"block_size must be at least 1, got {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.changes = 0  # how often anything here has changed
        self._free: OrderedDict[BlockId, None] = OrderedDict((BlockId(n), None) for n in range(1, num_blocks))
        self._references = [0] * num_blocks
        self._hash_of: dict[BlockId, BlockHash] = {}
        self._oldest: dict[BlockHash, BlockId] = {}  # the copy that serves hits
        self._younger: dict[BlockHash, list[BlockId]] = {}  # further copies, oldest first; absent where there are none
        self._events: list[CacheEvent] = []

    @property
    def usable_blocks(self) -> int:
        """How many blocks can be handed out at all."""
        return self.num_blocks - 1

    @property
    def free_blocks(self) -> int:
        """How many blocks nobody references; those that still serve hits are counted too."""
        return len(self._free)

    @property
    def used_fraction(self) -> float:
        """Share of the usable blocks that somebody references, 0 to 1. A warm idle cache shows 0."""
        return 1.0 - len(self._free) / self.usable_blocks

    def match(self, chain: PrefixChain, num_tokens: int) -> list[BlockId]:
        """Return the cached blocks of the longest prefix that a prompt of `num_tokens` may reuse. Takes nothing."""
        limit = max(0, num_tokens - 1) // self.block_size
        found: list[BlockId] = []
        for block_hash in hashes_of(chain)[:limit]:
            block = self._oldest.get(BlockHash(block_hash))
            if block is None:
                break
            found.append(block)
        return found

    def unreferenced(self, blocks: Iterable[BlockId]) -> int:
        """Count the blocks among `blocks` that would leave the queue of free ones when they are touched."""
        return sum(1 for block in blocks if not self._references[block])

    def touch(self, blocks: Iterable[BlockId]) -> None:
        """Reference cached blocks, which keeps them from being evicted."""
        self.changes += 1
        for block in blocks:
            if not self._references[block]:
                del self._free[block]
            self._references[block] += 1

    def take(self, count: int) -> list[BlockId]:
        """Hand out `count` blocks from the head of the queue, evicting what they held.

        The caller looks at `free_blocks` first: asking for more is its mistake.
        """
        assert count <= len(self._free), f"asked for {count} blocks, {len(self._free)} are free"
        if not count:
            return []
        self.changes += 1
        taken = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in taken:
            self._evict(block)
            self._references[block] = 1
        return taken

    def store(self, chain: PrefixChain, blocks: Sequence[BlockId], first: int, last: int) -> None:
        """Give the blocks at positions `first` to `last` - 1 of a sequence their hashes: they are full now."""
        if first >= last:
            return
        self.changes += 1
        hashes = hashes_of(chain)
        named = tuple(BlockHash(block_hash) for block_hash in hashes[first:last])
        for block, block_hash in zip(blocks[first:last], named, strict=True):
            self._hash_of[block] = block_hash
            if self._oldest.setdefault(block_hash, block) != block:
                self._younger.setdefault(block_hash, []).append(block)
        self._events.append(Stored(named, BlockHash(hashes[first - 1]) if first else None))

    def release(self, blocks: Sequence[BlockId]) -> None:
        """Drop one reference to each block of a sequence; those that nobody needs any more join the queue."""
        self.changes += 1
        idle = []
        for block in reversed(blocks):
            self._references[block] -= 1
            assert self._references[block] >= 0, f"block {block} was released more often than it was taken"
            if not self._references[block]:
                idle.append(block)
        for block in idle:
            if block in self._hash_of:
                self._free[block] = None
        for block in reversed(idle):
            if block not in self._hash_of:
                self._free[block] = None
                self._free.move_to_end(block, last=False)

    def reset(self) -> bool:
        """Forget every hash. Refused (False) while any block is referenced; the queue keeps its order."""
        if len(self._free) != self.usable_blocks:
            return False
        self.changes += 1
        self._hash_of.clear()
        self._oldest.clear()
        self._younger.clear()
        self._events.append(Cleared())
        return True

    def drain(self) -> list[CacheEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def queue(self) -> list[tuple[BlockId, BlockHash | None]]:
        """List the free blocks in the order in which they will be taken, with the hash that each still holds."""
        return [(block, self._hash_of.get(block)) for block in self._free]

    def _evict(self, block: BlockId) -> None:
        block_hash = self._hash_of.pop(block, None)
        if block_hash is None:
            return
        copies = self._younger.get(block_hash)
        if copies is None:
            del self._oldest[block_hash]
        else:
            if self._oldest[block_hash] == block:
                self._oldest[block_hash] = copies.pop(0)
            else:
                copies.remove(block)
            if not copies:
                del self._younger[block_hash]
        self._events.append(Removed(block_hash))

    def __repr__(self) -> str:
        return (
            f"<BlockPool {self.usable_blocks - self.free_blocks} of {self.usable_blocks} blocks referenced, "
            f"{len(self._hash_of)} cached>"
        )
