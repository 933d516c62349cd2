"""What is reached follows from what is held: prefix-closed on every tier, and faster tiers count on slower ones."""

from __future__ import annotations

import pytest

from kvroute.kv.block_tree import ROOT, BlockTree, cell_at
from kvroute.kv.cells import cells_of, pack_cells
from kvroute.kv.chain import PrefixChain, hashes_of
from kvroute.kv.residency import GROUP_BLOCKS

GPU, CPU, STORAGE = 1, 2, 4


def chain_in(tree: BlockTree, length: int, tiers: int = GPU, parent: int = ROOT, first: int = 1) -> list[int]:
    blocks = []
    for own in range(first, first + length):
        parent = tree.add(parent, own)
        tree.hold(parent, tiers)
        blocks.append(parent)
    return blocks


def reached(tree: BlockTree, tier: int = 0) -> set[int]:
    """The own hashes of what is reached, which are small numbers here."""
    return {cell >> 16 for cell in tree.cells[tier]}


def test_a_gap_hides_what_is_below_it():
    """Without a block its descendants are not reached; when it returns they are again, and only that is told."""
    tree = BlockTree()
    a, b, c, d = chain_in(tree, 4)
    branch = chain_in(tree, 2, parent=a, first=10)
    tree.take_changes()
    tree.hold(b, 0)
    assert reached(tree) == {1, 10, 11}
    assert {cell >> 16: now for cell, now in tree.take_changes()[0].items()} == {2: False, 3: False, 4: False}
    tree.hold(b, GPU)
    assert reached(tree) == {1, 2, 3, 4, 10, 11}
    assert {cell >> 16: now for cell, now in tree.take_changes()[0].items()} == {2: True, 3: True, 4: True}
    assert [tree.parent(block) for block in (a, b, c, d, branch[0])] == [ROOT, a, b, c, a]


def test_slower_tiers_go_on_where_faster_ones_end():
    """A tier's blocks count from where the faster tiers' run ends; blocks above a hole in it do not."""
    tree = BlockTree()
    blocks = chain_in(tree, 6)
    for block, tiers in zip(blocks, (GPU, GPU | CPU, CPU, CPU | STORAGE, STORAGE, GPU), strict=True):
        tree.hold(block, tiers)
    assert [reached(tree, tier) for tier in range(3)] == [{1, 2}, {1, 2, 3, 4}, {1, 2, 3, 4, 5}]
    tree.hold(blocks[2], 0)
    assert [reached(tree, tier) for tier in range(3)] == [{1, 2}] * 3


def test_a_tier_that_opens_takes_over_what_faster_ones_reach():
    """Nothing is told of tiers that hold nothing; with the first block on one, all faster ones' blocks count there."""
    tree = BlockTree()
    blocks = chain_in(tree, 3)
    assert [len(changes) for changes in tree.take_changes()] == [3, 0, 0]
    tree.hold(tree.add(blocks[-1], 9), STORAGE)
    assert [reached(tree, tier) for tier in range(3)] == [{1, 2, 3}, set(), {1, 2, 3, 9}]
    assert [len(changes) for changes in tree.take_changes()] == [0, 0, 4]


def test_an_opaque_block_ends_what_is_reached():
    """A block that no chain can name is never reached, nor is anything below it."""
    tree = BlockTree()
    (top,) = chain_in(tree, 1)
    media = tree.add(top, 7, is_opaque=True)
    tree.hold(media, GPU)
    chain_in(tree, 2, parent=media, first=8)
    assert (reached(tree), tree.is_opaque(media), tree.is_opaque(top), tree.held(media)) == ({1}, True, False, GPU)


def test_equal_contents_are_counted():
    """A cell of two blocks is told with the first of them and again with the last."""
    tree = BlockTree()
    first, second = chain_in(tree, 1) + chain_in(tree, 1)
    assert len(tree.take_changes()[0]) == 1
    tree.hold(first, 0)
    assert (reached(tree), tree.take_changes()[0]) == ({1}, {})
    tree.hold(second, 0)
    assert (reached(tree), list(tree.take_changes()[0].values())) == (set(), [False])


@pytest.mark.parametrize("gone", [0, 1, 2])
def test_dropped_blocks_leave_the_tree(gone):
    """A dropped block is no longer below its parent, wherever it stood among its siblings; its number is used again."""
    tree = BlockTree()
    (top,) = chain_in(tree, 1)
    siblings = [tree.add(top, own) for own in (5, 6, 7)]
    tree.drop(siblings[gone])
    left = [block for block in siblings if block != siblings[gone]]
    assert (sorted(tree.below(top)), len(tree)) == (left, 3)
    again = tree.add(top, 8)
    assert (again, sorted(tree.below(top)), tree.held(again)) == (siblings[gone], sorted([*left, again]), 0)


def test_cells_are_those_of_the_chain():
    """The tree gives a block the cell that its chain gives it, at any depth."""
    hashes = [0x1111_0000_0000_0000 * (i % 7) + 977 * i + 1 for i in range(2 * GROUP_BLOCKS + 5)]
    tree, parent = BlockTree(), ROOT
    for own in hashes:
        parent = tree.add(parent, own)
        tree.hold(parent, GPU)
    chain = PrefixChain(b"".join(own.to_bytes(8, "little") for own in hashes))
    assert list(tree.cells[0]) == list(cells_of(chain))
    assert pack_cells(cell_at(hashes_of(chain), depth) for depth in range(len(hashes))) == pack_cells(tree.cells[0])
