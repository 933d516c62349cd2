"""Blocks that may be gone, oldest first: since when nobody vouches for them, and how to find them by what they hold.

Ages are counted in deliveries: an engine that serves nobody evicts nothing. It does not know the tree that they are in.
"""

from __future__ import annotations

from collections.abc import Iterator


class Suspects:
    """Numbers of blocks, each with our hash of it (None where no chain can name it)."""

    def __init__(self) -> None:
        self.deliveries = 0
        self._vouched: dict[int, int] = {}  # -> number of the last delivery that found it, oldest first
        self._by_own: dict[int, list[int]] = {}

    def __len__(self) -> int:
        return len(self._vouched)

    def __contains__(self, block: int) -> bool:
        return block in self._vouched

    def __iter__(self) -> Iterator[int]:
        return iter(self._vouched)

    def add(self, block: int, own: int | None) -> None:
        """Suspect a block from now on, or vouch for it once more."""
        if self._vouched.pop(block, None) is None and own is not None:
            self._by_own.setdefault(own, []).append(block)
        self._vouched[block] = self.deliveries

    def remove(self, block: int, own: int) -> None:
        """A block is certain, or gone."""
        del self._vouched[block]
        if same := self._by_own.get(own):
            same[:] = [other for other in same if other != block]
            if not same:
                del self._by_own[own]

    def named(self, own: int) -> list[int]:
        """Return the suspects whose own hash this is."""
        return list(self._by_own.get(own, ()))

    def overdue(self, deliveries: int) -> int | None:
        """Return a block that nobody has vouched for in so many deliveries."""
        for block, vouched in self._vouched.items():
            return block if vouched + deliveries <= self.deliveries else None
        return None
