"""Which prefixes went through this deployment lately: what a cache of unlimited size could have hit.

Two generations of block hashes. A chain is added whole to the young one; when that is full it becomes the old one, and
the former old one is dropped. So memory is bounded, and what was used lately survives.

Rule 1. Each generation is prefix-closed: where a block is in it, all blocks before it are, since a chain enters from
        its root and a generation changes only between chains. So the depth of a chain is a matter of bisection.
Rule 2. Of a long chain only marks enter: each of the first EXACT_BLOCKS blocks, then every STRIDE-th. A depth is at
        most STRIDE - 1 blocks too small, and a long new prompt costs an eighth.
"""

from __future__ import annotations

from collections.abc import Iterable

from kvroute.kv.chain import PrefixChain, hashes_of

LIMIT_MARKS = 1 << 19  # about 40 MB; 8 million tokens of short prompts in blocks of 16, more of long ones
EXACT_BLOCKS = 64
STRIDE = 8
NONE = memoryview(b"").cast("Q")


class SeenWindow:
    """A bounded window of block hashes."""

    def __init__(self, limit_marks: int = LIMIT_MARKS) -> None:
        self._half = max(limit_marks // 2, 1)
        self._young: set[int] = set()
        self._old: set[int] = set()

    def __len__(self) -> int:
        return len(self._young | self._old)

    def see(self, chain: PrefixChain) -> int:
        """Take a chain in and return how many of its leading blocks were seen before; see `seen_blocks` and `add`."""
        marks = Marks(chain)
        known = marks.count_in(self._young)
        seen = known if known == marks.count or not self._old else max(known, marks.count_in(self._old))
        self._add(marks, known)
        return depth_of(seen)

    def seen_blocks(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of a chain were added within the window, or up to STRIDE - 1 fewer."""
        marks = Marks(chain)
        return depth_of(max(marks.count_in(self._young), marks.count_in(self._old)))

    def add(self, chain: PrefixChain) -> None:
        """Take a chain in; of one that is longer than half the window, the leading part."""
        marks = Marks(chain)
        self._add(marks, marks.count_in(self._young))

    def _add(self, marks: Marks, known: int) -> None:
        count = min(marks.count, self._half)
        if len(self._young) + count - known > self._half:
            self._young, self._old, known = set(), self._young, 0
        if known < count:
            self._young.update(marks.between(known, count))


class Marks:
    """The hashes of a chain that stand for it. Views: of a long chain that is known, few are looked at."""

    __slots__ = ("count", "far", "near")

    def __init__(self, chain: PrefixChain) -> None:
        hashes = hashes_of(chain)
        self.count = len(hashes)
        self.near, self.far = hashes, NONE
        if self.count > EXACT_BLOCKS:
            self.near, self.far = hashes[:EXACT_BLOCKS], hashes[EXACT_BLOCKS + STRIDE - 1 :: STRIDE]
            self.count = EXACT_BLOCKS + len(self.far)

    def count_in(self, generation: set[int]) -> int:
        """Return how many leading marks a prefix-closed set contains."""
        count = leading(generation, self.near)
        return count + leading(generation, self.far) if count == EXACT_BLOCKS else count

    def between(self, first: int, end: int) -> Iterable[int]:
        """Return the marks from number `first` up to `end`."""
        if end <= EXACT_BLOCKS:
            return self.near[first:end]
        return [*self.near[first:EXACT_BLOCKS], *self.far[max(0, first - EXACT_BLOCKS) : end - EXACT_BLOCKS]]


def depth_of(marks: int) -> int:
    """Return how many blocks that many leading marks stand for."""
    return marks if marks <= EXACT_BLOCKS else marks + (marks - EXACT_BLOCKS) * (STRIDE - 1)


def leading(generation: set[int], marks: memoryview) -> int:
    """Return how many of the first of these marks are in a set that holds, with each of them, those before it."""
    low, high = 0, len(marks)
    if not high or marks[0] not in generation:
        return 0
    if marks[-1] in generation:
        return high
    while high - low > 1:  # the mark before `low + 1` is in it, the one before `high` is not
        middle = (low + high) // 2
        if marks[middle] in generation:
            low = middle
        else:
            high = middle
    return low + 1
