"""What one replica's prefix cache holds, concluded from what was sent to it.

Theory. An engine frees a finished request's blocks tail first and gives the longest-freed block away first (vLLM's
BlockPool.free_blocks and get_new_blocks). If every request ran alone, the free queue would be ordered by (time of last
use, deepest first). Blocks of a chain that were last used together are neighbours in that queue, so the whole cache can
be kept as a radix tree of *runs*, one queue entry a run, and recording a chain costs a few steps per run that it
crosses, not per block.

Rule 1. Prefix-closed: a block is held only with all blocks before it. A descendant is never younger than its ancestor
        and comes before it in the queue, so the oldest run is always a leaf, and it loses its tail first.
Rule 2. Never more blocks than the capacity.
Rule 3. What leaves and what enters is reported as `Run`s, exactly once each.

It does not know requests that overlap in time, blocks that decoding adds, or other senders. A chain longer than the
cache is held up to the capacity. Time is the order of the calls.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import msgspec
from msgspec import Struct

from kvroute.kv.chain import HASH_BYTES, PrefixChain

GROUP_BLOCKS = 16  # neighbouring blocks of a chain that an index may store together, named by the first of them


class Run(Struct, frozen=True):
    """Neighbouring blocks of one chain, from the start of the group in which they begin.

    `hashes` starts at a depth that is a multiple of GROUP_BLOCKS; its first `skip` blocks only name that group.
    """

    skip: int
    hashes: bytes  # 8 bytes little-endian each

    def __len__(self) -> int:
        return len(self.hashes) // HASH_BYTES - self.skip

    @property
    def blocks(self) -> bytes:
        """The hashes of the run's own blocks."""
        return self.hashes[self.skip * HASH_BYTES :]


class Change(Struct, frozen=True):
    """What one call changed. `evicted` is in the order of eviction, so that no block outlives its parent."""

    held: int = 0  # leading blocks of the chain that were there before
    stored: Run | None = None
    evicted: tuple[Run, ...] = ()


class _Node:
    """A run in the tree: blocks that were last used together, below its parent's last block."""

    __slots__ = ("children", "hashes", "parent", "start")

    def __init__(self, parent: _Node | None, start: int, hashes: bytes) -> None:
        self.parent = parent
        self.start = start  # bytes of chain before this run
        self.hashes = hashes
        self.children: dict[bytes, _Node] = {}  # by the hash of their first block

    @property
    def key(self) -> bytes:
        return self.hashes[:HASH_BYTES]

    @property
    def end(self) -> int:
        return self.start + len(self.hashes)


class _Packed(Struct, frozen=True, array_like=True):
    capacity_blocks: int
    runs: list[tuple[int, bytes]]  # (index of the parent run, -1 = root; hashes), youngest first


class Residency:
    """The prefix cache of one replica, as far as it follows from what was recorded here."""

    def __init__(self, capacity_blocks: int) -> None:
        if capacity_blocks < 0:
            raise ValueError(f"capacity_blocks must not be negative, got {capacity_blocks}")
        self.capacity_blocks = capacity_blocks
        self._root = _Node(None, 0, b"")
        self._queue: OrderedDict[_Node, None] = OrderedDict()  # oldest first
        self._used = 0  # blocks

    def __len__(self) -> int:
        """Blocks held."""
        return self._used

    def __repr__(self) -> str:
        return f"<Residency {self._used}/{self.capacity_blocks} blocks in {len(self._queue)} runs>"

    def held(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of `chain` are held. Looking does not count as use."""
        return self._find(chain, len(chain))[1] // HASH_BYTES

    def record(self, chain: PrefixChain) -> Change:
        """Note that the replica computed the chain and holds it now; what had to make room is in the answer."""
        end = min(len(chain), self.capacity_blocks * HASH_BYTES)
        if not end:
            return Change()
        node, at = self._find(chain, end)
        if at < node.end:
            node = self._split(node, at)
        if at < end:
            node = self._grow(node, chain[at:end])
        self._touch(node)
        stored = Run((at // HASH_BYTES) % GROUP_BLOCKS, chain[_group_start(at) : end]) if at < end else None
        evicted = tuple(self._evict()) if self._used > self.capacity_blocks else ()
        return Change(at // HASH_BYTES, stored, evicted)

    def correct(self, chain: PrefixChain, held_blocks: int) -> Change:
        """Note that the replica holds only the first `held_blocks` blocks of the chain, and so nothing below them."""
        end = min(held_blocks * HASH_BYTES, len(chain))
        node, at = self._find(chain, end)
        key = chain[end : end + HASH_BYTES]
        held = at // HASH_BYTES
        if at < end or not key:
            return Change(held)
        if at == node.end:
            child = node.children.get(key)
            return Change(held, None, tuple(self._drop(child))) if child else Change(held)
        cut = at - node.start
        if node.hashes[cut : cut + HASH_BYTES] != key:
            return Change(held)
        evicted = [run for child in list(node.children.values()) for run in self._drop(child)]
        evicted.append(self._shorten(node, cut))
        return Change(held, None, tuple(evicted))

    def forget(self, chain: PrefixChain) -> None:
        """Drop a chain, or what was not evicted of it, as far up as no longer one shares it. Nothing is reported."""
        node, at = self._find(chain, len(chain))
        if at != node.end:
            return
        while node.parent is not None and not node.children:
            leaf, node = node, node.parent
            self._shorten(leaf, 0)

    def chains(self) -> Iterator[tuple[PrefixChain, int]]:
        """Yield every chain to a leaf, oldest first, with the count of its leading blocks that were yielded before.

        Recording them in this order into an empty Residency rebuilds this one. Do not change it meanwhile.
        """
        seen: set[_Node] = set()
        for leaf in self._queue:
            if leaf.children:
                continue
            parts, known, node = [], 0, leaf
            while node.parent is not None:
                parts.append(node.hashes)
                if node in seen:
                    known = max(known, node.end)
                seen.add(node)
                node = node.parent
            yield PrefixChain(b"".join(reversed(parts))), known // HASH_BYTES

    def pack(self) -> bytes:
        """Return a snapshot for `unpack`: about 8 bytes a block."""
        index = {self._root: -1}
        runs = []
        for node in reversed(self._queue):  # parents are younger than their children, so they come first
            assert node.parent is not None
            runs.append((index[node.parent], node.hashes))
            index[node] = len(index) - 1
        return msgspec.msgpack.encode(_Packed(self.capacity_blocks, runs))

    @classmethod
    def unpack(cls, data: bytes) -> Residency:
        """Rebuild from a snapshot.

        Raises:
            ValueError: the bytes are not a snapshot.
        """
        packed = msgspec.msgpack.decode(data, type=_Packed)  # its ValidationError is a ValueError
        fresh = cls(packed.capacity_blocks)
        nodes: list[_Node] = []
        for parent_index, hashes in packed.runs:
            if not -1 <= parent_index < len(nodes) or not hashes or len(hashes) % HASH_BYTES:
                raise ValueError("a run without its parent or without whole hashes")
            parent = nodes[parent_index] if parent_index >= 0 else fresh._root
            nodes.append(fresh._attach(parent, hashes))
        for node in reversed(nodes):
            fresh._queue.move_to_end(node)
        if fresh._used > fresh.capacity_blocks:
            raise ValueError(f"{fresh._used} blocks in a cache of {fresh.capacity_blocks}")
        return fresh

    def _find(self, chain: bytes, end: int) -> tuple[_Node, int]:
        """Return the deepest run that the first `end` bytes of the chain reach, and how many of the bytes match."""
        node, at = self._root, 0
        while at < end:
            child = node.children.get(chain[at : at + HASH_BYTES])
            if child is None:
                break
            node = child
            if at + len(node.hashes) <= end and chain.startswith(node.hashes, at):
                at += len(node.hashes)
                continue
            at += common_bytes(chain[at:end], node.hashes)
            break
        return node, at

    def _split(self, lower: _Node, at: int) -> _Node:
        """Cut a run in two at byte `at` of its chain; the upper part is returned and has yet to be touched."""
        assert lower.parent is not None
        cut = at - lower.start
        upper = _Node(lower.parent, lower.start, lower.hashes[:cut])
        lower.parent.children[upper.key] = upper
        lower.parent, lower.start, lower.hashes = upper, at, lower.hashes[cut:]
        upper.children[lower.key] = lower
        self._queue[upper] = None
        return upper

    def _grow(self, node: _Node, hashes: bytes) -> _Node:
        """Append to a leaf run, or hang a new run below a run that others continue."""
        if node.children or node.parent is None:
            return self._attach(node, hashes)
        node.hashes += hashes
        self._used += len(hashes) // HASH_BYTES
        return node

    def _attach(self, parent: _Node, hashes: bytes) -> _Node:
        node = _Node(parent, parent.end, hashes)
        parent.children[node.key] = node
        self._queue[node] = None
        self._used += len(hashes) // HASH_BYTES
        return node

    def _touch(self, node: _Node) -> None:
        """Move a run and all above it to the young end, deepest first, joining runs that only continue each other."""
        while node.parent is not None:
            above = node.parent
            while above.parent is not None and len(above.children) == 1:
                node.hashes = above.hashes + node.hashes
                node.start, node.parent = above.start, above.parent
                node.parent.children[node.key] = node
                del self._queue[above]
                above = node.parent
            self._queue.move_to_end(node)
            node = above

    def _evict(self) -> Iterator[Run]:
        while self._used > self.capacity_blocks:
            node = next(iter(self._queue))
            assert not node.children, "the oldest run is a leaf"
            spare = max(0, len(node.hashes) - (self._used - self.capacity_blocks) * HASH_BYTES)
            yield self._shorten(node, spare)

    def _drop(self, top: _Node) -> Iterator[Run]:
        """Remove a run and all below it, leaves first."""
        order = [top]
        for node in order:
            order.extend(node.children.values())
        for node in reversed(order):
            yield self._shorten(node, 0)

    def _shorten(self, leaf: _Node, keep_bytes: int) -> Run:
        """Take the tail off a leaf run, or the whole run."""
        gone = leaf.hashes[keep_bytes:]
        lead = _lead(leaf, leaf.start + keep_bytes)
        self._used -= len(gone) // HASH_BYTES
        if keep_bytes:
            leaf.hashes = leaf.hashes[:keep_bytes]
        else:
            assert leaf.parent is not None
            del leaf.parent.children[leaf.key]
            del self._queue[leaf]
        return Run(len(lead) // HASH_BYTES, lead + gone)


def _group_start(at: int) -> int:
    return at - at % (GROUP_BLOCKS * HASH_BYTES)


def _lead(node: _Node, at: int) -> bytes:
    """Return the hashes from the start of the group that byte `at` lies in, up to it."""
    low, parts = _group_start(at), []
    while low < at:
        first = max(low, node.start)
        parts.append(node.hashes[first - node.start : at - node.start])
        at = first
        if node.parent is None:
            break
        node = node.parent
    return b"".join(reversed(parts))


def common_bytes(one: bytes, other: bytes) -> int:
    """Return the bytes of the common prefix, in whole hashes. Bisected, because slices compare at memory speed."""
    low, high = 0, min(len(one), len(other)) // HASH_BYTES
    if one[: high * HASH_BYTES] == other[: high * HASH_BYTES]:  # mostly, one goes on where the other ends
        return high * HASH_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[low * HASH_BYTES : middle * HASH_BYTES] == other[low * HASH_BYTES : middle * HASH_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low * HASH_BYTES
