"""Texts that were tokenised before, so that a conversation which grew costs only its new end.

A text may be cut before any anchor (see `tokenizer`). For each text two starts are remembered: up to its last anchor,
where the next turn will go on, and up to the end of its first message, which other conversations share. Looking up
walks back from the end over the anchors; only places at which some remembered text ended are worth a hash.

The ids of a start do not depend on the cache key, its chain does; so a start carries one chain per root and block size.
"""

from __future__ import annotations

import secrets

from msgspec import Struct
from xxhash import xxh3_128_digest

from kvroute.adapters.generations import Generations
from kvroute.kv.chain import HASH_BYTES, TOKEN_BYTES, PrefixChain, Root, extend

WALK_LIMIT = 256  # anchors looked at from the end of a text before it counts as new
CHAINS_PER_START = 8  # roots and block sizes remembered for one text
ENTRY_BYTES = 500  # of an entry besides its ids and chains
SHORTEST_BYTES = 512  # tokenising less is cheaper than remembering it


class Start(Struct):
    """A remembered beginning of texts."""

    ids: bytes
    chains: dict[tuple[int, Root], bytes]  # (block size, root) -> hashes of the whole blocks of `ids`


EMPTY = Start(b"", {})


class KnownTexts:
    """Starts of texts by their content, bounded in bytes.

    Args:
        anchor: what a text may be cut before; None where it may not be cut.
        limit_bytes: what the entries may weigh together.
    """

    def __init__(self, anchor: str | None, limit_bytes: int) -> None:
        self.hits = 0  # texts of which a start was known
        self.misses = 0
        self._anchor = anchor.encode() if anchor else None
        self._starts: Generations[bytes, Start] = Generations(limit_bytes)
        self._lengths: Generations[int, None] = Generations(limit_bytes // ENTRY_BYTES)  # weight 1 each
        self._seed = secrets.randbits(64)  # so that nobody can make two texts that share an entry

    @property
    def used_bytes(self) -> int:
        """What the entries weigh."""
        return self._starts.used_bytes

    def find(self, text: bytes) -> tuple[int, Start]:
        """Return the longest known start of a text as its length in bytes and what is known of it; 0 for none."""
        at = len(text)
        for _ in range(WALK_LIMIT if self._anchor else 0):
            at = text.rfind(self._anchor or b"", 0, at)
            if at < SHORTEST_BYTES:
                break
            if at in self._lengths and (start := self._starts.get(self._key(text, at))) is not None:
                self.hits += 1
                return at, start
        self.misses += 1
        return 0, EMPTY

    def cuts(self, text: bytes, known: int) -> list[int]:
        """Return the places behind a known start that are worth remembering, in order."""
        if self._anchor is None:
            return []
        last = text.rfind(self._anchor)
        found = {last} if known else {text.find(self._anchor, text.find(self._anchor) + 1), last}
        return sorted(at for at in found if at > known and at >= SHORTEST_BYTES)

    def add(self, text: bytes, at: int, ids: bytes, chain_key: tuple[int, Root], chain: bytes) -> None:
        """Remember the start of a text up to a cut, with its ids and the chain of its whole blocks."""
        key = self._key(text, at)
        start = self._starts.get(key) or Start(ids, {})
        remember_chain(start, chain_key, chain)
        self._starts.put(key, start, ENTRY_BYTES + len(ids) + sum(map(len, start.chains.values())))
        self._lengths.put(at, None, 1)

    def _key(self, text: bytes, at: int) -> bytes:
        return xxh3_128_digest(memoryview(text)[:at], self._seed)


def remember_chain(start: Start, chain_key: tuple[int, Root], chain: bytes) -> None:
    """Add a chain to a start, forgetting the others where there are too many."""
    if len(start.chains) >= CHAINS_PER_START:
        start.chains.clear()
    start.chains[chain_key] = chain


def chain_from(start: Start, ids: bytes, block_size: int, root: Root) -> PrefixChain:
    """Return the chain of `ids`, which begin with those of `start`, hashing only what `start` has not hashed yet."""
    known = start.chains.get((block_size, root), b"")
    parent = int.from_bytes(known[-HASH_BYTES:], "little") if known else root
    done = len(known) // HASH_BYTES * block_size * TOKEN_BYTES
    return PrefixChain(known + extend(parent, ids[done:], block_size))


def whole_blocks(chain: bytes, ids: bytes, block_size: int) -> bytes:
    """Return the part of a chain that covers whole blocks of `ids`."""
    return chain[: len(ids) // (block_size * TOKEN_BYTES) * HASH_BYTES]
