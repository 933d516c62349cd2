"""Copies of KV blocks in CPU memory, behind an engine's own cache.

The rules follow vLLM's offloading connector with its LRU policy (`v1/kv_offload/cpu/manager.py`):

Rule 1. A block is copied here when it has been computed. It stays when the engine's own cache loses it. What a prompt
        found in the engine's cache is used here too, and copied again where it is here no longer, unless more of the
        same prompt came from here.
Rule 2. The block that was used longest ago makes room. Of one chain the tail counts as older than the head.
Rule 3. A prompt finds here what continues, without a gap, what the engine's own cache has of it.
Rule 4. What one chain adds at once is kept as a whole or, where it is larger than all the memory, not at all.
Rule 5. Every block that comes or goes is announced by itself, with the medium "CPU".

Not known here: how long copies take, and that they may fail.
"""

from __future__ import annotations

from collections import OrderedDict

from kvroute.kv.chain import BlockHash, PrefixChain, hashes_of
from kvroute.kv.pool import CacheEvent, Removed, Stored


class OffloadTier:
    """Blocks by their hash, each at most once."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"num_blocks must be at least 1, got {num_blocks}")
        self.num_blocks = num_blocks
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()  # the one used longest ago is first
        self._events: list[CacheEvent] = []

    def match(self, chain: PrefixChain, first: int, limit: int) -> int:
        """Count the blocks of a chain that are here, from position `first` up to `limit` - 1, without a gap."""
        found = 0
        for block_hash in hashes_of(chain)[first:limit]:
            if block_hash not in self._blocks:
                break
            found += 1
        return found

    def use(self, chain: PrefixChain, first: int, last: int) -> None:
        """Note that the blocks at positions `first` to `last` - 1 are used; those that are not here are passed over."""
        for block_hash in reversed(hashes_of(chain)[first:last]):
            if block_hash in self._blocks:
                self._blocks.move_to_end(BlockHash(block_hash))

    def keep(self, chain: PrefixChain, first: int, last: int) -> None:
        """Copy the blocks at positions `first` to `last` - 1, as far as they are not here already."""
        hashes = [BlockHash(block_hash) for block_hash in hashes_of(chain)[:last]]
        added = [place for place in range(first, last) if hashes[place] not in self._blocks]
        if len(added) > self.num_blocks:
            return
        self.use(chain, first, last)
        while len(self._blocks) + len(added) > self.num_blocks:
            self._events.append(Removed(self._blocks.popitem(last=False)[0], "CPU"))
        for place in reversed(added):
            self._blocks[hashes[place]] = None
        for place in added:
            self._events.append(Stored((hashes[place],), hashes[place - 1] if place else None, "CPU"))

    def reset(self) -> None:
        """Forget everything; nobody is told, as the engine's own reset says it for both."""
        self._blocks.clear()

    def drain(self) -> list[CacheEvent]:
        """Return what changed since the last call, in order."""
        events, self._events = self._events, []
        return events

    def __len__(self) -> int:
        return len(self._blocks)

    def __repr__(self) -> str:
        return f"<OffloadTier {len(self)} of {self.num_blocks} blocks>"
