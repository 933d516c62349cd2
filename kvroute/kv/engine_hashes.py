"""What one engine says it holds: its KV events, turned into blocks that our own chains can name.

Rule 1. Engine hashes are opaque. What an event stores is hashed again from its token ids, adapter and salt, as
        `kv.chain` would; an engine hash is only the handle by which later events speak of a block.
Rule 2. An engine stores one content in several places, and says so for each: copies are counted by group and tier, and
        a block is held on a tier while every group that is indexed there has a copy.
Rule 3. Only groups whose every block stays (full, MLA and sink-full attention) can promise a hit; others say where it
        may end (`hit_ends`).
Rule 4. A chain ends for us where media begin, as the chains of prompts do: such blocks are remembered, so that events
        about them are understood, and never published. The same for adapters that are only a number (before 0.14).
Rule 5. After events were lost, blocks are *suspect*: held as far as is known. A block stored below one confirms it, and
        so does a delivery, as far as it lies on the GPU. They go with their first removal, when a delivery falls short
        of them, oldest first when the cache would hold more than it can, and after SUSPECT_DELIVERIES deliveries.
Rule 6. From then on deliveries teach: what a request found and no event told of is remembered as a chain of its own.
        The engine's names for it are not known, so it stays suspect, vouched for by each delivery that finds it again.

Before 0.18 events name neither salts nor media, so what they say of such prompts cannot be told from plain text.
It does not know sequence numbers, sockets, or where changes go.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable

import msgspec

from kvroute.kv import engine_snapshot
from kvroute.kv.block_copies import COPIES_MAX, BlockCopies
from kvroute.kv.block_tree import OPAQUE, ROOT, TIERS, BlockTree, cell_at
from kvroute.kv.cells import Changes, changes_of, pack_cells
from kvroute.kv.chain import TOKEN_BYTES, PrefixChain, Root, extend, hashes_of, root_of
from kvroute.kv.engine_snapshot import VERSION, Packed
from kvroute.kv.event_keys import GROUPS_MAX, is_sparse, read_keys, tier_of
from kvroute.kv.events import BlocksRemoved, BlocksStored, EngineHash, EventBatch, EventCounters, unheard
from kvroute.kv.hit_ends import ENDS, HitEnds, SparseGroup
from kvroute.kv.suspects import Suspects

SUSPECT_DELIVERIES = 50
BLOCKS_PER_CAPACITY = 16  # blocks remembered at most, lower tiers and placeholders included, per block of GPU cache
BLOCKS_SPARE = 4096
ROOTS_MAX = 1024
_GPU = 1  # among tiers that are a mask


class EngineHashes:
    """One engine's cache: engine hash -> block, and the copies of each."""

    def __init__(self, model: str, capacity_blocks: int, block_size: int | None = None) -> None:
        self.counters = EventCounters()
        self.block_size = block_size  # tokens; None until it was learnt
        self.capacity_blocks = capacity_blocks  # of the GPU
        self.tree = BlockTree()
        self.ends = HitEnds()
        self._model = model
        self._blocks: dict[EngineHash, int] = {}
        self._names: list[EngineHash] = []  # by block
        self._copies = BlockCopies()
        self._sparse: set[int] = set()
        self._roots: dict[tuple[str | None, str | None], Root] = {}
        self._suspects = Suspects()
        self._learnt: set[int] = set()  # of the suspects, those that only deliveries told of
        self._is_incomplete = False  # events of this life were lost

    def __len__(self) -> int:
        """Blocks that are remembered, wherever they lie."""
        return len(self._blocks)

    def __repr__(self) -> str:
        reached = ", ".join(f"{len(cells)} {tier}" for tier, cells in zip(TIERS, self.tree.cells, strict=True) if cells)
        return f"<EngineHashes {len(self)} blocks, reached: {reached or 'none'}>"

    @property
    def suspects(self) -> int:
        """Blocks that may be gone."""
        return len(self._suspects)

    @property
    def can_learn(self) -> bool:
        """Whether deliveries say more than is known: events of this life were lost."""
        return self._is_incomplete

    def apply(self, batch: EventBatch) -> None:
        """Take in what an engine step changed."""
        self.counters.ignored_events += batch.ignored
        for event in batch.events:
            if isinstance(event, BlocksStored):
                self._store(event)
            elif isinstance(event, BlocksRemoved):
                self._remove(event)
            else:
                self.clear()
        if self._suspects and self._copies.on_gpu > self.capacity_blocks:
            self._age()
        if self.ends.groups:  # now, though it is told later: who hears the same after a snapshot must tell of it, too
            self._settle()

    def _settle(self) -> None:
        self.ends.settle(self.tree, self._names, self.block_size or 1)

    def clear(self) -> None:
        """Forget all blocks: the cache was reset, or the engine restarted. Lower tiers go too, if perhaps too early."""
        self.counters.clears += 1
        old = self.tree
        self.tree = BlockTree()
        self.tree.open = old.open
        for tier, changes in enumerate(self.tree.changes):
            changes.update(old.changes[tier])
            changes.update(dict.fromkeys(old.cells[tier], False))
        self._blocks, self._names, self._copies = {}, [], BlockCopies()
        self._suspects, self._learnt = Suspects(), set()
        self._is_incomplete = False
        self.ends.forget()

    def held(self, chain: PrefixChain, tier: int = 0) -> int:
        """Return how many leading blocks of a chain are reached on a tier."""
        cells, hashes = self.tree.cells[tier], hashes_of(chain)
        return bisect_left(range(len(hashes)), True, key=lambda depth: cell_at(hashes, depth) not in cells)

    def reusable(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of a chain a request finds on the GPU: up to where all groups let it end."""
        self._settle()
        return self.ends.nearest(hashes_of(chain), self.held(chain))

    def changes(self) -> list[Changes]:
        """Return what changed since this was last asked, for each tier that did, and where hits may end."""
        self._settle()
        taken, ends = self.tree.take_changes(), self.ends.take_changes()
        changes = [changes_of(tier, cells) for tier, cells in enumerate(taken) if cells]
        return changes if ends is None else [*changes, changes_of(ENDS, ends)]

    def everything(self) -> list[Changes]:
        """Return all that is reached now, for a store that has nothing of it; nothing is then left to tell."""
        self.changes()
        everything = [Changes(tier, b"", pack_cells(cells)) for tier, cells in enumerate(self.tree.cells) if cells]
        return [*everything, Changes(ENDS, b"", pack_cells(self.ends.cells))] if self.ends.are_needed else everything

    def suspect(self) -> None:
        """Note that events were lost: every block may be gone, and no count of copies can be trusted."""
        self._copies.flatten()
        self._is_incomplete = True
        self.ends.forget()
        self._suspects = Suspects()
        for block in self._blocks.values():
            if self._copies.has_any(block):
                self._suspect(block)
        self.counters.suspected += len(self._suspects)

    def delivered(self, chain: PrefixChain, held_blocks: int) -> None:
        """Note that a request found the first `held_blocks` blocks of its chain in the cache, and not the next one."""
        if not self._is_incomplete:
            return
        self._suspects.deliveries += 1
        hashes = hashes_of(chain)
        held_blocks = min(held_blocks, len(hashes))
        ending = self._suspects.named(hashes[held_blocks - 1]) if held_blocks else []
        for own in hashes[:held_blocks]:
            for block in self._suspects.named(own):
                self._vouch(block)
        if held_blocks < len(hashes):
            for block in self._suspects.named(hashes[held_blocks]):
                self._give_up(block)
        while (overdue := self._suspects.overdue(SUSPECT_DELIVERIES)) is not None:
            self._give_up(overdue)
        if held_blocks > max(self.held(chain, tier) for tier in range(len(TIERS))):
            self._learn(hashes[:held_blocks])
            ending = self._suspects.named(hashes[held_blocks - 1])
        for block in ending if self._has_room(len(hashes)) else ():
            if self._blocks.get(self._names[block]) == block:  # else it has just been given up
                self.ends.vouch(self.tree, block, self._names, self.block_size or 1)

    def _has_room(self, more: int) -> bool:
        bound = BLOCKS_PER_CAPACITY * self.capacity_blocks + BLOCKS_SPARE
        return max(len(self._blocks), len(self.ends)) + more <= bound

    def _learn(self, hashes: memoryview) -> None:
        """Remember a chain that a request found, though no event told of it."""
        if not self._has_room(len(hashes)):
            self.counters.refused += len(hashes)
            return
        parent = ROOT
        self._copies.assume()
        for own in hashes:
            name = unheard(own)
            block = self._blocks.get(name)
            if block is None:
                block = self._blocks[name] = self.tree.add(parent, own)
                self._name(block, name)
                self._learnt.add(block)
                self.counters.learnt += 1
            self._copies.teach(block)
            self.tree.hold(block, _GPU)
            self._suspect(block)
            parent = block

    def _suspect(self, block: int) -> None:
        self._suspects.add(block, None if self.tree.is_opaque(block) else self.tree.own(block))

    def _store(self, event: BlocksStored) -> None:
        hashes, counters = event.hashes, self.counters
        if is_sparse(event) or event.group in self._sparse:
            counters.sparse += len(hashes)
            if not event.is_report:  # which names blocks of theirs that are gone, too
                self._store_sparse(event)
            return
        if not event.token_ids or event.block_size <= 0:
            counters.placeholders += len(hashes)
            return
        if self.block_size is None and len(event.token_ids) == len(hashes) * event.block_size * TOKEN_BYTES:
            self.block_size = event.block_size
        if event.block_size != self.block_size or len(event.token_ids) != len(hashes) * self.block_size * TOKEN_BYTES:
            counters.mismatches += len(hashes)
            if event.kind is None and event.group is not None and not tier_of(event.medium):
                self._exclude(event.group)
                self._store_sparse(event)
            return
        parent = ROOT if event.parent is None else self._blocks.get(event.parent)
        if parent is None:
            counters.unknown_parents += len(hashes)
            return
        tier = tier_of(event.medium)
        if not self._has_room(len(hashes)) or not self._copies.admits(event.group, tier):
            counters.refused += len(hashes)
            return
        if self._suspects and not tier:
            self._confirm(parent)
        salt, plain = read_keys(event)
        above = self._root(event.lora_name, salt) if parent == ROOT else self.tree.own(parent)
        own = array("Q", extend(above, event.token_ids, event.block_size))
        counters.stored += len(hashes)
        counters.opaque += len(hashes) - plain
        self._hold(event, tier, own, parent, plain)

    def _store_sparse(self, event: BlocksStored) -> None:
        group = event.group
        if group is None or tier_of(event.medium) or event.block_size <= 0:
            return
        if group not in self.ends.groups:
            if not self.ends.admit(group, event.kind, event.window, event.block_size):
                return
            self._look_at(self._blocks)
        if self._has_room(len(event.hashes)):
            self._look_at(self.ends.store(group, event.hashes))
        else:
            self.counters.refused += len(event.hashes)

    def _look_at(self, names: Iterable[EngineHash]) -> None:
        for name in names:
            if (block := self._blocks.get(name)) is not None:
                self.ends.look_at(block)

    def _hold(self, event: BlocksStored, tier: int, own: array[int], parent: int, plain: int) -> None:
        """Count a copy of each block, of a report where there is none; put those that are new below their parent."""
        if self._copies.open(event.group, tier):
            self._hold_whole(tier)
        tree, blocks, column = self.tree, self._blocks, self._copies.find(event.group, tier)
        assert column is not None
        is_shared, is_report, stored = len(self._copies.on(tier)) > 1, event.is_report, 0
        for number, name in enumerate(event.hashes):
            block = blocks.get(name)
            if block is None:
                block = tree.add(parent, own[number], number == plain)
                blocks[name] = block
                self._name(block, name)
            parent = block
            copies = column[block]
            if self._suspects and block in self._suspects:
                if not tier:
                    self._confirm(block)
                if copies:  # perhaps the copy that was known is gone, and this is another one
                    continue
            if copies >= COPIES_MAX or (is_report and copies):
                continue
            column[block] = copies + 1
            stored += 1
            if not copies and (not is_shared or self._copies.is_whole(block, tier)):
                tree.hold(block, tree.held(block) | 1 << tier)
        if column is self._copies.gpu:
            self._copies.on_gpu += stored
        for twin in reversed(own) if is_report else ():
            self._forget_learnt(twin, is_gone=False)

    def _remove(self, event: BlocksRemoved) -> None:
        tier = tier_of(event.medium)
        column = self._copies.find(event.group, tier)
        if column is None:
            if event.group in self.ends.groups and not tier:
                self._look_at(self.ends.remove(event.group, event.hashes))
            elif event.group not in self._sparse:
                self.counters.unknown_removals += len(event.hashes)
            return
        tree, blocks, tier_bit, counts = self.tree, self._blocks, 1 << tier, self._copies
        is_gpu = column is counts.gpu
        unknown = 0
        for name in event.hashes:
            block = blocks.get(name)
            copies = column[block] if block is not None else 0
            if block is None or not copies:
                unknown += 1
                continue
            column[block] = copies - 1
            counts.on_gpu -= is_gpu
            if copies == 1:
                if self._learnt:
                    self._forget_learnt(tree.own(block), is_gone=True)
                held = tree.held(block) & ~tier_bit
                tree.hold(block, held)
                if not held:
                    self._gone(block)
        self.counters.unknown_removals += unknown
        self.counters.removed += len(event.hashes) - unknown

    def _forget_learnt(self, own: int, *, is_gone: bool) -> None:
        """An engine has told, by its own name, of a block that deliveries had taught, too."""
        for block in self._suspects.named(own):
            if block in self._learnt and (is_gone or not self.tree.has_children(block)):
                self._give_up(block)

    def _gone(self, block: int) -> None:
        """No tier has a block any more, as far as whole ones go: forget it, unless something still needs it."""
        tree, copies = self.tree, self._copies
        while block != ROOT and not tree.has_children(block) and not tree.held(block):
            if len(copies) > 1 and copies.has_any(block):
                return
            parent = tree.parent(block)
            if self.ends.groups:
                self.ends.drop(tree, block, self._names[block], is_known=block not in self._learnt)
            if block in self._suspects:
                self._suspects.remove(block, self.tree.own(block))
                self._learnt.discard(block)
            del self._blocks[self._names[block]]
            tree.drop(block)
            block = parent

    def _exclude(self, group: int) -> None:
        """A group turned out to be sparse, which releases before 0.22 do not say."""
        if len(self._sparse) >= GROUPS_MAX:
            return
        self._sparse.add(group)
        column = self._copies.find(group, 0)
        if column is not None and self.ends.admit(group, None, None, self.block_size or 1):
            self.ends.groups[group].copies |= {name: column[at] for name, at in self._blocks.items() if column[at]}
            self._look_at(self._blocks)
        self._hold_whole(*self._copies.close(group))

    def _hold_whole(self, *tiers: int) -> None:
        """The groups of these tiers have changed: look again which blocks all of them have."""
        for tier in tiers:
            bit, columns = 1 << tier, self._copies.on(tier)
            for block in self._blocks.values():
                held = self.tree.held(block)
                if bool(held & bit) != (bool(columns) and all(column[block] for column in columns)):
                    self.tree.hold(block, held ^ bit)
        for name in list(self._blocks):
            block = self._blocks.get(name, ROOT)  # it may have gone with one that was below it
            if block != ROOT and not self.tree.held(block):
                self._gone(block)

    def _name(self, block: int, name: EngineHash) -> None:
        if self.ends.groups:
            self.ends.look_at(block)
        if block < len(self._names):
            self._names[block] = name
            return
        self._names.extend([name] * (block + 1 - len(self._names)))
        self._copies.lengthen(len(self._names))

    def _root(self, lora: str | None, salt: str | None) -> Root:
        root = self._roots.get((lora, salt))
        if root is None:
            if len(self._roots) >= ROOTS_MAX:
                self._roots.clear()
            root = self._roots[lora, salt] = root_of(self._model, lora, salt)
        return root

    def _vouch(self, block: int) -> None:
        """A request has found a suspect block: on the GPU, or where it will go on being suspect."""
        if self.tree.held(block) & _GPU:
            self._confirm(block)
        else:
            self._suspect(block)

    def _confirm(self, block: int) -> None:
        """The engine has a block on its GPU, so it has all above it there; for slower tiers nobody vouches."""
        tree = self.tree
        while block != ROOT and block in self._suspects:
            held = tree.held(block)
            if block in self._learnt or not held & _GPU:
                self._suspect(block)
            else:
                self._suspects.remove(block, tree.own(block))
                self.counters.confirmed += 1
                if held != _GPU:
                    self._copies.drop_slower(block)
                    tree.hold(block, _GPU)
            block = tree.parent(block)

    def _give_up(self, top: int) -> None:
        """Drop a suspect block, and with it the suspects below, and those right above of which nothing more is known
        than the engine itself has told."""
        if top not in self._suspects:
            return
        tree = self.tree
        above = tree.parent(top)
        self._drop(top)
        while above in self._learnt and not tree.has_children(above) and tree.cells[0].get(tree.cell(above), 0) > 1:
            top, above = above, tree.parent(above)
            self._drop(top)

    def _drop(self, top: int) -> None:
        order = [top]
        for block in order:
            order.extend(child for child in self.tree.below(block) if child in self._suspects)
        for block in reversed(order):
            if block in self._suspects:  # else it went with the last one that was below it
                self._copies.drop(block)
                self.tree.hold(block, 0)
                self._suspects.remove(block, self.tree.own(block))
                self._gone(block)
                self._learnt.discard(block)
        self.counters.dropped += len(order)

    def _age(self) -> None:
        """The GPU holds more than it can: of the suspects the oldest chains go first, tail first."""
        while self._suspects and self._copies.on_gpu > self.capacity_blocks:
            block = next(iter(self._suspects))
            while (child := next((c for c in self.tree.below(block) if c in self._suspects), ROOT)) != ROOT:
                block = child
            self._give_up(block)

    def pack(self) -> bytes:
        """Return a snapshot for `unpack`: about 25 bytes a block."""
        order = list(self._blocks.values())
        number = {block: at for at, block in enumerate(order)}
        number[ROOT] = ROOT
        tree = self.tree
        return msgspec.msgpack.encode(
            Packed(
                version=VERSION,
                block_size=self.block_size,
                open=tree.open,
                hashes=list(self._blocks),
                own=array("Q", map(tree.own, order)).tobytes(),
                parents=array("i", [number[tree.parent(block)] for block in order]).tobytes(),
                opaque=[at for at, block in enumerate(order) if tree.is_opaque(block)],
                columns=self._copies.packed(order),
                suspects=[number[block] for block in self._suspects],
                learnt=[number[block] for block in self._learnt],
                is_incomplete=self._is_incomplete,
                sparse_groups=sorted(self._sparse),
                sparse_copies=[
                    (number, group.window, group.block_size, group.copies) for number, group in self.ends.groups.items()
                ],
            )
        )

    @classmethod
    def unpack(cls, data: bytes, model: str, capacity_blocks: int) -> EngineHashes:
        """Rebuild from a snapshot; nothing of it counts as changed.

        Raises:
            ValueError: the bytes are not a snapshot.
        """
        packed = engine_snapshot.read(data)
        fresh = cls(model, capacity_blocks, packed.block_size)
        fresh._sparse = set(packed.sparse_groups)
        fresh.ends.groups |= {number: SparseGroup(w, size, held) for number, w, size, held in packed.sparse_copies}
        fresh._rebuild(packed)
        fresh.changes()
        return fresh

    def _rebuild(self, packed: Packed) -> None:
        own, parents, opaque = array("Q", packed.own), packed.parent_numbers(), set(packed.opaque)
        columns = packed.copies()
        self.tree.open = packed.open & (OPAQUE - 1)
        order: list[int] = []
        for at, name in enumerate(packed.hashes):
            block = self.tree.add(order[parents[at]] if parents[at] >= 0 else ROOT, own[at], at in opaque)
            self._blocks[name] = block
            self._name(block, name)
            order.append(block)
        for group, tier, copies in columns:
            self._copies.load(order, group, tier, copies)
        self._hold_whole(*{tier for _, tier, _ in columns})
        self._is_incomplete = packed.is_incomplete
        self._learnt = {order[at] for at in packed.learnt}
        if (unnamed := self._copies.find(None, 0)) is not None:
            self._copies.is_assumed = not any(unnamed[block] for block in order if block not in self._learnt)
        for at in packed.suspects:
            self._suspect(order[at])
