"""Which prefixes went through this deployment lately: what a cache of unlimited size could have hit.

Two generations of block hashes. A chain is added whole to the young one; when that is full it becomes the old one, and
the former old one is dropped. So memory is bounded, and what was used lately survives.

Rule 1. Each generation is prefix-closed: where a block is in it, all blocks before it are, since a chain enters from
        its root and a generation changes only between chains. So the depth of a chain is a matter of bisection.
Rule 2. Of a long chain only marks enter: each of the first EXACT_BLOCKS blocks, then every STRIDE-th. A depth is at
        most STRIDE - 1 blocks too small, and a long new prompt costs an eighth.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from kvroute.kv.chain import PrefixChain, hashes_of

LIMIT_MARKS = 1 << 19  # about 40 MB; 8 million tokens of short prompts in blocks of 16, more of long ones
EXACT_BLOCKS = 64
STRIDE = 8


class SeenWindow:
    """A bounded window of block hashes."""

    def __init__(self, limit_marks: int = LIMIT_MARKS) -> None:
        self._half = max(limit_marks // 2, 1)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def seen_blocks(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of a chain were added within the window, or up to STRIDE - 1 fewer."""
        marks = marks_of(chain)
        return depth_of(max(count_in(self._young, marks), count_in(self._old, marks)))

    def add(self, chain: PrefixChain) -> None:
        """Take a chain in; of one that is longer than half the window, the leading part."""
        marks = marks_of(chain)[: self._half]
        known = count_in(self._young, marks)
        if len(self._young) + len(marks) - known > self._half:
            self._young, self._old, known = set(), self._young, 0
        self._young.update(marks[known:])


def marks_of(chain: PrefixChain) -> list[int]:
    """Return the hashes of a chain that stand for it."""
    hashes = hashes_of(chain)
    return [*hashes[:EXACT_BLOCKS], *hashes[EXACT_BLOCKS + STRIDE - 1 :: STRIDE]]


def depth_of(marks: int) -> int:
    """Return how many blocks that many leading marks stand for."""
    return marks + max(0, marks - EXACT_BLOCKS) * (STRIDE - 1)


def count_in(generation: set[int], marks: Sequence[int]) -> int:
    """Return how many leading marks a prefix-closed set contains."""
    if not marks or marks[0] not in generation:
        return 0
    return bisect_left(marks, True, key=lambda mark: mark not in generation)
