"""How many copies an engine has of each block, by KV cache group and tier, for blocks by their number in the tree.

An engine stores one content in several places and tells of each copy as it comes and goes. Groups that promise hits are
counted here; a block counts on a tier while every group that was ever stored to there has a copy.

It does not know names, chains, or which blocks are in doubt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from kvroute.kv.event_keys import GROUPS_MAX

COPIES_MAX = 65_535
_NONE: array[int] = array("H")


class BlockCopies:
    """Columns of counts, one for each group on each tier."""

    def __init__(self) -> None:
        self.on_gpu = 0  # in the first of its groups: how much of the cache is taken
        self.is_assumed = False  # the GPU's only group is one without a number, and no event has said so
        self._columns: dict[tuple[int | None, int], array[int]] = {}  # group, tier
        self._length = 0

    def __len__(self) -> int:
        return len(self._columns)

    @property
    def gpu(self) -> array[int]:
        """The first column of the GPU; an empty one where there is none."""
        return next((column for key, column in self._columns.items() if not key[1]), _NONE)

    def on(self, tier: int) -> list[array[int]]:
        """Return the columns of a tier."""
        return [column for key, column in self._columns.items() if key[1] == tier]

    def find(self, group: int | None, tier: int) -> array[int] | None:
        """Return the column of a group on a tier; None where nothing was stored there."""
        return self._columns.get((group, tier))

    def admits(self, group: int | None, tier: int) -> bool:
        """Whether a group is counted on a tier, or would be: there is a bound on how many are."""
        return (group, tier) in self._columns or len(self._columns) < GROUPS_MAX

    def open(self, group: int | None, tier: int) -> bool:
        """Begin to count a group on a tier; return whether that tier has another group now than before."""
        if not tier and self.is_assumed:
            self.is_assumed = False
            self._columns[group, 0] = self._columns.pop((None, 0))
            return False
        if (group, tier) in self._columns:
            return False
        self._columns[group, tier] = array("H", bytes(2 * self._length))
        return True

    def assume(self) -> None:
        """Have a column for the GPU before events have told of a group; the first group that they name is that."""
        if not self.on(0):
            self.is_assumed = self.open(None, 0)

    def close(self, group: int) -> list[int]:
        """Count a group no longer; return the tiers where it was counted."""
        tiers = [key[1] for key in self._columns if key[0] == group]
        for tier in tiers:
            del self._columns[group, tier]
        self.recount()
        return tiers

    def lengthen(self, length: int) -> None:
        """Make room for blocks with numbers below `length`."""
        for column in self._columns.values():
            column.frombytes(bytes(2 * (length - len(column))))
        self._length = length

    def recount(self) -> None:
        """Count anew what the GPU has, after columns were written to from outside or have changed."""
        self.on_gpu = sum(self.gpu)

    def flatten(self) -> None:
        """Count one copy where there are several: events were lost, and nobody knows how many are left."""
        for key, column in self._columns.items():
            self._columns[key] = array("H", map(bool, column))
        self.recount()

    def is_whole(self, block: int, tier: int) -> bool:
        """Whether all groups of a tier have a block."""
        columns = self.on(tier)
        return bool(columns) and all(column[block] for column in columns)

    def has_any(self, block: int) -> bool:
        """Whether some group on some tier has a block."""
        return any(column[block] for column in self._columns.values())

    def teach(self, block: int) -> None:
        """Have one copy of a block in every group of the GPU."""
        gpu = self.gpu
        self.on_gpu += 1 - gpu[block]
        for column in self.on(0):
            column[block] = 1

    def drop(self, block: int) -> None:
        """Have no copy of a block anywhere."""
        gpu = self.gpu
        self.on_gpu -= gpu[block] if gpu else 0
        for column in self._columns.values():
            column[block] = 0

    def drop_slower(self, block: int) -> None:
        """Have no copy of a block but the GPU's."""
        for key, column in self._columns.items():
            if key[1]:
                column[block] = 0

    def packed(self, order: Sequence[int]) -> list[tuple[int | None, int, bytes]]:
        """Return group, tier and the copies of these blocks, in order."""
        return [
            (group, tier, array("H", [column[block] for block in order]).tobytes())
            for (group, tier), column in self._columns.items()
        ]

    def load(self, order: Sequence[int], group: int | None, tier: int, copies: Sequence[int]) -> None:
        """Take in what was packed."""
        self.open(group, tier)
        column = self._columns[group, tier]
        for block, count in zip(order, copies, strict=True):
            column[block] = count
        self.recount()
