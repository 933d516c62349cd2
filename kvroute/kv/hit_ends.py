"""Where a hit may end on an engine whose model is a hybrid, as far as the events of its sparse groups tell.

Theory. Such a model has layers that see only a window, or carry one state (Mamba), in groups of their own beside those
with full attention. These keep a prompt's last blocks and let the others go. vLLM shortens a hit until every group has
what it needs there (v1/core/kv_cache_coordinator.py, `find_longest_cache_hit`): a window group the blocks that the
window reaches back over, or all from the root; a Mamba group the state at that very place.

    end(block)  =  every sparse group has a run of blocks up to this one: as long as its window, or from the root

Events of all groups call a block by the same engine hash, so a sparse group's copies are counted by that name, whether
the tree knows the block yet or not. Ends are not prefix-closed and do not depend on what full attention holds: a lookup
first finds how deep that goes, and from there walks back to the nearest end.

A group with larger blocks names each by its last tokens, so its ends lie at every so many blocks of the tree. One with
smaller blocks is looked at where blocks of the tree end. Not considered are groups of which events do not tell enough:
chunked local attention (no chunk size) and unknown kinds. Before 0.22, where a group's window is not told, its own last
block is asked for.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from heapq import heapify, heappop, heappush

from kvroute.kv.block_tree import ROOT, TIERS, BlockTree, cell_at
from kvroute.kv.event_keys import GROUPS_MAX
from kvroute.kv.events import EngineHash

ENDS = len(TIERS)  # stands for ends among the tiers of changes
WINDOWED = frozenset({"sliding_window", "sliding_window_mla"})
STATES = frozenset({None, "mamba"})  # kinds of groups that need their last block

RUN_MAX = (1 << 32) - 1  # blocks: more than any cache has


class SparseGroup:
    """One sparse group: its copies by the engine's name, and how many blocks in a row it has up to each."""

    def __init__(self, window: int | None, block_size: int, copies: dict[EngineHash, int] | None = None) -> None:
        self.window = window  # tokens; None: the last block alone is needed
        self.block_size = block_size
        self.copies = copies or {}
        self.runs = array("I")  # by number in the tree, in blocks of this group

    def step(self, block_size: int) -> int:
        """Return how many of the tree's blocks go into one of this group's."""
        return max(1, self.block_size // block_size)

    def need(self, block_size: int) -> int:
        """Return how long a run a hit needs."""
        if self.window is None:
            return 1
        return min(max(1, -(-(self.window - 1) // max(self.block_size, block_size))), RUN_MAX)


class HitEnds:
    """The ends of one engine's hits, as cells, and those that changed since they were last taken."""

    def __init__(self) -> None:
        self.cells: dict[int, int] = {}  # cell -> ends with it
        self.groups: dict[int, SparseGroup] = {}
        self._changes: dict[int, bool] = {}
        self._is_told = False  # that hits must end here
        self._is_end = bytearray()  # by number in the tree
        self._unsettled: set[int] = set()

    @property
    def are_needed(self) -> bool:
        """Whether the model is a hybrid: elsewhere a hit ends where what is held does."""
        return bool(self.groups)

    @property
    def have_changes(self) -> bool:
        """Whether something was told, or is about to be, since changes were last taken."""
        return bool(self._changes or self._unsettled) or (self.are_needed and not self._is_told)

    def admit(self, group: int, kind: str | None, window: int | None, block_size: int) -> bool:
        """Note that a group is sparse; return whether it has a say in where hits end."""
        if group not in self.groups:
            if (kind not in WINDOWED and kind not in STATES) or len(self.groups) >= GROUPS_MAX:
                return False
            self.groups[group] = SparseGroup(window if kind in WINDOWED else None, block_size)
        return True

    def store(self, group: int, names: Sequence[EngineHash]) -> list[EngineHash]:
        """Count a copy of each block; return those of which there was none."""
        copies, fresh = self.groups[group].copies, []
        for name in names:
            if count := copies.get(name):
                copies[name] = count + 1
            else:
                copies[name] = 1
                fresh.append(name)
        return fresh

    def remove(self, group: int, names: Sequence[EngineHash]) -> list[EngineHash]:
        """Count one copy less of each block; return those of which there is none any more."""
        copies, gone = self.groups[group].copies, []
        for name in names:
            count = copies.get(name, 0)
            if count > 1:
                copies[name] = count - 1
            elif count:
                del copies[name]
                gone.append(name)
        return gone

    def vouch(self, tree: BlockTree, block: int, names: Sequence[EngineHash], block_size: int) -> None:
        """Note that a hit ended at a block, so that every group has what it needs there."""
        for group in self.groups.values():
            step, at = group.step(block_size), block
            for number in range(step * group.need(block_size)):
                if at == ROOT:
                    break
                if number % step == 0:
                    group.copies.setdefault(names[at], 1)
                    self.look_at(at)
                at = tree.parent(at)

    def look_at(self, block: int) -> None:
        """Note that a block is new in the tree, or that the copies of it changed."""
        self._unsettled.add(block)

    def nearest(self, hashes: memoryview, depth: int) -> int:
        """Return how many of the first `depth` blocks of a chain count; all that was told must be settled."""
        if not self.groups:
            return depth
        return next((count for count in range(depth, 0, -1) if cell_at(hashes, count - 1) in self.cells), 0)

    def settle(self, tree: BlockTree, names: Sequence[EngineHash], block_size: int) -> None:
        """Bring the ends in line with the copies. `names` are the engine's, by number in the tree."""
        self._is_end.extend(bytes(max(0, len(names) - len(self._is_end))))
        for group in self.groups.values():
            group.runs.frombytes(bytes(group.runs.itemsize * max(0, len(names) - len(group.runs))))
        waiting = [(tree.depth(block), block) for block in self._unsettled]
        heapify(waiting)  # parents before their children, so that each is worked out once
        while waiting:
            block = heappop(waiting)[1]
            is_end = True
            for group in self.groups.values():
                step, need = group.step(block_size), group.need(block_size)
                run, is_whole = self._run(tree, group, block, names[block], step, need)
                if run != group.runs[block]:
                    group.runs[block] = run
                    for below in _below(tree, block, step):
                        if below not in self._unsettled:
                            self._unsettled.add(below)
                            heappush(waiting, (tree.depth(below), below))
                is_end = is_end and is_whole
            self._mark(tree.cell(block), block, is_end)
        self._unsettled.clear()

    def drop(self, tree: BlockTree, block: int, name: EngineHash, *, is_known: bool) -> None:
        """Forget a block that leaves the tree; with its copies, where no event will tell of them (not `is_known`)."""
        self._unsettled.discard(block)
        if block < len(self._is_end):
            self._mark(tree.cell(block), block, False)
        if not is_known:
            for group in self.groups.values():
                group.copies.pop(name, None)

    def forget(self) -> None:
        """Forget all copies: the cache was emptied, or events were lost. What the groups need stays."""
        self._changes.update(dict.fromkeys(self.cells, False))
        self.cells, self._is_end = {}, bytearray()
        self._unsettled.clear()
        self.groups = {number: SparseGroup(group.window, group.block_size) for number, group in self.groups.items()}

    def take_changes(self) -> dict[int, bool] | None:
        """Return what changed since the last time; None where nobody need be told."""
        if not self.groups or (self._is_told and not self._changes):
            return None
        self._is_told = True
        changes, self._changes = self._changes, {}
        return changes

    def __len__(self) -> int:
        """Copies that are remembered, each name once a group."""
        return sum(len(group.copies) for group in self.groups.values())

    def _run(
        self, tree: BlockTree, group: SparseGroup, block: int, name: EngineHash, step: int, need: int
    ) -> tuple[int, bool]:
        """Return how many blocks of a group are there in a row up to a block, and whether a hit may end with them."""
        if name not in group.copies or (step > 1 and tree.depth(block) % step):
            return 0, False
        above = block
        for _ in range(step):
            above = tree.parent(above)
        if above == ROOT:
            return need, True
        run = min(need, group.runs[above] + 1)
        return run, run == need

    def _mark(self, cell: int, block: int, is_end: bool) -> None:
        if bool(self._is_end[block]) == is_end:
            return
        self._is_end[block] = is_end
        count = self.cells.get(cell, 0) + (1 if is_end else -1)
        if count:
            self.cells[cell] = count
        else:
            del self.cells[cell]
        if count == is_end:  # the first came, or the last went
            self._changes[cell] = is_end


def _below(tree: BlockTree, block: int, levels: int) -> Iterable[int]:
    """Return the blocks so many levels below one."""
    found = [block]
    for _ in range(levels):
        found = [child for one in found for child in tree.below(one)]
        if not found:
            break
    return found
