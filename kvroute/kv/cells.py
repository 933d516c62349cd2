"""Where a block lies in the index: a bucket, named by two bytes of the hash of its group's first block, and in it a
field, named by six bytes of its own hash. A cell is both in 64 bits, the bucket in the lower 16.

docs/decisions/002 says why blocks lie so. Cells travel packed, 8 bytes little-endian each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from kvroute.kv.chain import PrefixChain, hashes_of
from kvroute.kv.residency import GROUP_BLOCKS

MASK_64 = 0xFFFF_FFFF_FFFF_FFFF
CELL_BYTES = 8


class Changes(Struct, frozen=True):
    """What began and what ceased to be reachable on one tier."""

    tier: int
    gone: bytes  # cells
    added: bytes  # cells

    def __len__(self) -> int:
        return (len(self.gone) + len(self.added)) // CELL_BYTES


def cell_of(own: int, head: int) -> int:
    """Return the cell of a block with the hash `own`, in the group whose first block has the hash `head`."""
    return (own << 16 & MASK_64) | (head & 0xFFFF)


def cells_of(chain: PrefixChain) -> Iterator[int]:
    """Yield the cells of a chain's blocks."""
    hashes = hashes_of(chain)
    for depth, own in enumerate(hashes):
        yield cell_of(own, hashes[depth - depth % GROUP_BLOCKS])


def pack_cells(cells: Iterable[int]) -> bytes:
    """Return cells as they travel."""
    return array("Q", cells).tobytes()


def changes_of(tier: int, cells: Mapping[int, bool]) -> Changes:
    """Pack what changed on one tier: cells, and whether they are reachable now."""
    gone = [cell for cell, is_reached in cells.items() if not is_reached]
    if not gone:
        return Changes(tier, b"", pack_cells(cells))
    if len(gone) == len(cells):
        return Changes(tier, pack_cells(gone), b"")
    return Changes(tier, pack_cells(gone), pack_cells([cell for cell, is_reached in cells.items() if is_reached]))
