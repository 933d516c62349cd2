"""Short names for block hashes and cache events, so that a trace reads as it is drawn: `S[a0,a1]<-None`, `R[a2]`."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from kvroute.kv.chain import BlockHash, PrefixChain
from kvroute.kv.pool import BlockPool, CacheEvent, Cleared, Removed, Stored


def chain(*parts: str) -> PrefixChain:
    """Make a chain: `chain("a3", "b2")` is a0 a1 a2 b3 b4, where the prompts a and b part after three blocks."""
    hashes = array("Q")
    for part in parts:
        for _ in range(int(part[1:])):
            hashes.append(ord(part[0]) << 32 | len(hashes))
    return PrefixChain(hashes.tobytes())


def name(block_hash: BlockHash | None) -> str:
    """Give a hash its short name back."""
    return "None" if block_hash is None else f"{chr(block_hash >> 32)}{block_hash & 0xFFFF_FFFF}"


def written(events: Iterable[CacheEvent]) -> str:
    """Write events in one line."""
    return " ".join(map(_written, events))


def queue(pool: BlockPool) -> str:
    """Write the queue of free blocks: number, and in brackets the hash that a block still holds."""
    return " ".join(f"{block}({name(held)})" if held is not None else str(block) for block, held in pool.queue())


def _written(event: CacheEvent) -> str:
    match event:
        case Stored(hashes, parent):
            return f"S[{','.join(map(name, hashes))}]<-{name(parent)}"
        case Removed(block_hash):
            return f"R[{name(block_hash)}]"
        case Cleared():
            return "Cleared"
