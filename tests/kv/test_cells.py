"""Cells name the bucket and the field that the index's scripts use."""

from __future__ import annotations

from kvroute.kv.cells import CELL_BYTES, Changes, cell_of, cells_of, pack_cells
from kvroute.kv.chain import PrefixChain
from kvroute.kv.residency import GROUP_BLOCKS


def test_a_cell_is_bucket_and_field():
    """Packed, a cell is two bytes of its group's first hash and six of its own: what write.lua takes of a chain."""
    chain = PrefixChain(bytes(i % 251 for i in range(8 * (2 * GROUP_BLOCKS + 3))))
    packed = pack_cells(cells_of(chain))
    for depth in range(len(chain) // 8):
        head = 8 * (depth - depth % GROUP_BLOCKS)
        expected = chain[head : head + 2] + chain[8 * depth : 8 * depth + 6]
        assert packed[CELL_BYTES * depth : CELL_BYTES * (depth + 1)] == expected


def test_changes_count_blocks():
    """The length of changes is the number of blocks that they are about."""
    assert len(Changes(0, pack_cells([1, 2]), pack_cells([cell_of(3, 4)]))) == 3
