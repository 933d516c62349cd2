"""Which prefixes went through this deployment lately: what a cache of unlimited size could have hit.

Two generations of block hashes. A chain is added whole to the young one; when that is full it becomes the old one, and
the former old one is dropped. So memory is bounded, and what was used lately survives.

Rule. Each generation is prefix-closed: where a block is in it, all blocks before it are, since a chain enters from its
root and a generation changes only between chains. That makes the depth of a chain a matter of bisection.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvroute.kv.chain import PrefixChain, hashes_of

LIMIT_BLOCKS = 1 << 19  # 8 million tokens in blocks of 16; about 40 MB


class SeenWindow:
    """A bounded window of block hashes."""

    def __init__(self, limit_blocks: int = LIMIT_BLOCKS) -> None:
        self._half = max(limit_blocks // 2, 1)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def seen_blocks(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of a chain were added within the window."""
        hashes = hashes_of(chain)
        return max(depth_in(self._young, hashes), depth_in(self._old, hashes))

    def add(self, chain: PrefixChain) -> None:
        """Take a chain in; of one that is longer than half the window, the leading part."""
        hashes = hashes_of(chain)[: self._half]
        known = depth_in(self._young, hashes)
        if len(self._young) + len(hashes) - known > self._half:
            self._young, self._old, known = set(), self._young, 0
        self._young.update(hashes[known:])


def depth_in(generation: set[int], hashes: Sequence[int]) -> int:
    """Return how many leading hashes a prefix-closed set contains."""
    return bisect_left(hashes, True, key=lambda hash_: hash_ not in generation)
