"""Texts that were tokenised before, so that a conversation which grew costs only its new end.

A text may be cut before any anchor (see `tokenizer`). For each text two starts are remembered: up to its last anchor,
where the next turn will go on, and up to the end of its first message, which other conversations share. Looking up
walks back from the end over the anchors; only places at which some remembered text ended are worth a hash.

An entry holds the chain and the few tokens behind it, not all ids, so a long conversation costs half a byte a token and
turn. Chains depend on block size and root, so these are part of the key.
"""

from __future__ import annotations

import secrets

from xxhash import xxh3_128_digest

from kvroute.adapters.generations import Generations
from kvroute.kv.chain import Grown, Root

WALK_LIMIT = 256  # anchors looked at from the end of a text before it counts as new
ENTRY_BYTES = 500  # of an entry besides its chain and tail
SHORTEST_BYTES = 512  # tokenising less is cheaper than remembering it


EMPTY = Grown()
ChainKey = tuple[int, Root]  # block size and root


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
        self._starts: Generations[tuple[bytes, ChainKey], Grown] = Generations(limit_bytes)
        self._lengths: Generations[int, None] = Generations(limit_bytes // ENTRY_BYTES)  # weight 1 each
        self._seed = secrets.randbits(64)  # so that nobody can make two texts that share an entry

    @property
    def used_bytes(self) -> int:
        """What the entries weigh."""
        return self._starts.used_bytes

    def find(self, text: bytes, chain_key: ChainKey) -> tuple[int, Grown]:
        """Return the longest known start of a text as its length in bytes and what is known of it; 0 for none."""
        at = len(text)
        for _ in range(WALK_LIMIT if self._anchor else 0):
            at = text.rfind(self._anchor or b"", 0, at)
            if at < SHORTEST_BYTES:
                break
            if at in self._lengths and (start := self._starts.get((self._key(text, at), chain_key))) is not None:
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

    def add(self, text: bytes, at: int, chain_key: ChainKey, start: Grown) -> None:
        """Remember the start of a text up to a cut."""
        weight_bytes = ENTRY_BYTES + len(start.chain) + len(start.tail)
        self._starts.put((self._key(text, at), chain_key), start, weight_bytes)
        self._lengths.put(at, None, 1)

    def _key(self, text: bytes, at: int) -> bytes:
        return xxh3_128_digest(memoryview(text)[:at], self._seed)
