"""The blocks that one engine says it has, as the tree that their prefixes form, and which of them can be hit.

Theory. An engine's lookup walks a prompt's blocks from the root on its GPU until one is missing, and then asks the next
slower tier for the blocks that follow. So a block counts on a tier only if the walk gets there:

    reached(GPU)  = on the GPU and parent reached(GPU)
    reached(CPU)  = reached(GPU), or in CPU memory and parent reached(CPU)       and so on for slower tiers

Each is prefix-closed, whatever order the engine evicts in: when a block in the middle goes, all below it are no longer
reached, and they are again when it returns. Whoever is told the changes can bisect.

Blocks are numbers, kept in arrays: a fleet has millions of them, and the garbage collector would walk objects. A block
that is nowhere but has blocks below it stays to hold them. Blocks with the same cell (an engine may keep a content
under several hashes) are counted, and the cell changes with the first and the last of them.

It does not know engine hashes, groups or reference counts.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from kvroute.kv.cells import MASK_64, cell_of
from kvroute.kv.residency import GROUP_BLOCKS

TIERS = ("GPU", "CPU", "STORAGE")  # from the fastest; what an engine may call its slowest has many names
ROOT = -1
EVERY_TIER = (1 << len(TIERS)) - 1
OPAQUE = 1 << len(TIERS)  # of a block that no prompt's chain can name: it and all below it are never reached


def _reached(above: int, held: int) -> int:
    """Return the tiers on which a block is reached, as a mask: those of its parent, and where it is held."""
    mask, faster = 0, False
    for tier in range(len(TIERS)):
        faster = faster or bool(held & above & 1 << tier)
        mask |= faster << tier
    return 0 if held & OPAQUE else mask


_REACHED = [[_reached(above, held) for held in range(2 * OPAQUE)] for above in range(EVERY_TIER + 1)]


class BlockTree:
    """Blocks, where they are held, and the cells that changed since they were last taken."""

    def __init__(self) -> None:
        self.open = 1  # tiers on which anything was ever held
        self.changes: tuple[dict[int, bool], ...] = tuple({} for _ in TIERS)  # cell -> is it reached now; last wins
        self.cells: tuple[dict[int, int], ...] = tuple({} for _ in TIERS)  # cell -> reached blocks with it
        self._own = array("Q")  # our chained hash; of an opaque block anything
        self._cell = array("Q")
        self._depth = array("I")  # blocks above
        self._parent = array("i")
        self._child = array("i")  # first one, ROOT = none
        self._next = array("i")  # sibling
        self._previous = array("i")
        self._held = bytearray()  # tiers, and OPAQUE
        self._reach = bytearray()  # tiers
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._own) - len(self._free)

    def parent(self, block: int) -> int:
        """Return the block above, or ROOT."""
        return self._parent[block]

    def own(self, block: int) -> int:
        """Return the chained hash of a block."""
        return self._own[block]

    def cell(self, block: int) -> int:
        """Return where the index keeps a block."""
        return self._cell[block]

    def depth(self, block: int) -> int:
        """Return how many blocks a chain has that ends with this one."""
        return self._depth[block] + 1

    def held(self, block: int) -> int:
        """Return the tiers that hold a block, as a mask."""
        return self._held[block] & EVERY_TIER

    def is_opaque(self, block: int) -> bool:
        """Say whether no chain can name this block, or one above it."""
        return block != ROOT and self._held[block] >= OPAQUE

    def has_children(self, block: int) -> bool:
        """Say whether blocks below this one are known."""
        return self._child[block] >= 0

    def first_child(self, block: int) -> int:
        """Return a block right below this one, or ROOT."""
        return self._child[block]

    def below(self, block: int) -> Iterator[int]:
        """Yield the blocks right below one."""
        child = self._child[block]
        while child >= 0:
            yield child
            child = self._next[child]

    def add(self, parent: int, own: int, is_opaque: bool = False) -> int:
        """Put a block below another, held nowhere yet; return its number, which is the lowest that is free."""
        depth, bucket = 0, own
        if parent >= 0:
            depth = self._depth[parent] + 1
            bucket = self._cell[parent] if depth % GROUP_BLOCKS else own
        cell = (own << 16 & MASK_64) | (bucket & 0xFFFF)
        if not self._free:
            self._lengthen()
        block = self._free.pop()
        self._own[block], self._cell[block], self._depth[block] = own, cell, depth
        self._held[block] = OPAQUE if is_opaque else 0
        self._parent[block] = parent
        if parent >= 0:
            sibling = self._child[parent]
            self._next[block] = sibling
            if sibling >= 0:
                self._previous[sibling] = block
            self._child[parent] = block
        return block

    def drop(self, block: int) -> None:
        """Forget a block that is held nowhere and has none below it."""
        parent, following, previous = self._parent[block], self._next[block], self._previous[block]
        if following >= 0:
            self._previous[following] = previous
        if previous >= 0:
            self._next[previous] = following
        elif parent >= 0:
            self._child[parent] = following
        self._next[block] = self._previous[block] = self._parent[block] = ROOT
        self._free.append(block)

    def hold(self, block: int, tiers: int) -> None:
        """Note that these tiers, as a mask, hold a block, and no others."""
        opaque = self._held[block] & OPAQUE
        if tiers & ~self.open:
            self.open |= tiers
            self._held[block] = tiers | opaque
            self._reach_all()
            return
        self._held[block] = tiers | opaque
        parent = self._parent[block]
        above = self._reach[parent] if parent >= 0 else EVERY_TIER
        new = _REACHED[above][tiers | opaque] & self.open
        if new != self._reach[block]:
            self._set(block, new)
            if self._child[block] >= 0:
                self._descend(block)

    def take_changes(self) -> tuple[dict[int, bool], ...]:
        """Return what changed since the last time, by tier."""
        changes, self.changes = self.changes, tuple({} for _ in TIERS)
        return changes

    def _lengthen(self) -> None:
        start = len(self._own)
        count = max(256, start // 8)
        for numbers in (self._own, self._cell, self._depth):
            numbers.extend([0] * count)
        for links in (self._parent, self._child, self._next, self._previous):
            links.extend([ROOT] * count)
        for flags in (self._held, self._reach):
            flags.extend(bytes(count))
        self._free.extend(range(start + count - 1, start - 1, -1))

    def _set(self, block: int, new: int) -> None:
        old, self._reach[block] = self._reach[block], new
        cell, changed, tier = self._cell[block], old ^ new, 0
        while changed:
            if changed & 1:
                cells = self.cells[tier]
                if new >> tier & 1:
                    if cell in cells:
                        cells[cell] += 1
                    else:
                        cells[cell] = 1
                        self.changes[tier][cell] = True
                elif cells[cell] > 1:
                    cells[cell] -= 1
                else:
                    del cells[cell]
                    self.changes[tier][cell] = False
            changed >>= 1
            tier += 1

    def _descend(self, top: int) -> None:
        """Bring the blocks below one in line with it, as far down as anything changes."""
        waiting = [top]
        while waiting:
            block = waiting.pop()
            reach = _REACHED[self._reach[block]]
            child = self._child[block]
            while child >= 0:
                new = reach[self._held[child]] & self.open
                if new != self._reach[child]:
                    self._set(child, new)
                    waiting.append(child)
                child = self._next[child]

    def _reach_all(self) -> None:
        """A tier was opened: what is reached on faster ones is reached on it too."""
        free = set(self._free)
        for block in range(len(self._own)):
            if self._parent[block] < 0 and block not in free:
                new = _REACHED[EVERY_TIER][self._held[block]] & self.open
                if new != self._reach[block]:
                    self._set(block, new)
                self._descend(block)


def cell_at(hashes: memoryview, depth: int) -> int:
    """Return the cell of the block at a depth of a chain (see `chain.hashes_of`)."""
    return cell_of(hashes[depth], hashes[depth - depth % GROUP_BLOCKS])
