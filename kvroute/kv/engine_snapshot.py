"""How a table of an engine's blocks travels to the next owner of its stream: about 25 bytes a block.

It does not know what the parts mean to the table; only that they fit together.
"""

from __future__ import annotations

from array import array

import msgspec
from msgspec import Struct

from kvroute.kv.block_tree import TIERS
from kvroute.kv.events import EngineHash

VERSION = 3


class Packed(Struct, frozen=True, array_like=True):
    version: int
    block_size: int | None
    open: int
    hashes: list[EngineHash]  # parents before their children
    own: bytes  # 8 bytes a block
    parents: bytes  # 4 bytes a block: the number of the parent in this list, -1 = root
    opaque: list[int]  # numbers in this list, as are all below
    columns: list[tuple[int | None, int, bytes]]  # group, tier, copies, 2 bytes a block
    suspects: list[int]
    learnt: list[int]
    is_incomplete: bool
    sparse_groups: list[int]
    sparse_copies: list[tuple[int, int | None, int, dict[EngineHash, int]]]  # group, window, block size, copies

    def parent_numbers(self) -> array[int]:
        """Return the parent of each block, -1 where it begins a chain."""
        return array("i", self.parents)

    def copies(self) -> list[tuple[int | None, int, array[int]]]:
        """Return group, tier, and the copies of each block."""
        return [(group, tier, array("H", counts)) for group, tier, counts in self.columns]


def read(data: bytes) -> Packed:
    """Take a snapshot apart.

    Raises:
        ValueError: the bytes are not a snapshot.
    """
    packed = msgspec.msgpack.decode(data, type=Packed)  # its ValidationError is a ValueError
    count = len(packed.hashes)
    sizes = [len(packed.own) // 8, len(packed.parents) // 4, *(len(column[2]) // 2 for column in packed.columns)]
    if packed.version != VERSION or set(sizes) != {count}:
        raise ValueError(f"a snapshot of version {packed.version} with parts of {sizes} blocks for {count}")
    if any(not 0 <= tier < len(TIERS) for _, tier, _ in packed.columns):
        raise ValueError("a tier that is not known")
    if any(not -1 <= parent < at for at, parent in enumerate(packed.parent_numbers())):
        raise ValueError("a block without its parent")
    if len(set(packed.hashes)) != count or (packed.block_size or 1) < 1:
        raise ValueError("a name that stands for two blocks, or a block without tokens")
    if any(not 0 <= at < count for at in (*packed.opaque, *packed.suspects, *packed.learnt)):
        raise ValueError("a number that is no block's")
    return packed
