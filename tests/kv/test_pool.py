"""The block pool against a trace of vLLM 0.33's own manager, and its laws."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvroute.kv.chain import PrefixChain
from kvroute.kv.pool import BlockId, BlockPool, Cleared, Removed, Stored
from tests.kv.notation import chain, queue, written

SIZE = 4


class Holder:
    """A sequence that grows, the way an engine's manager uses the pool."""

    def __init__(self, pool: BlockPool, prompt: PrefixChain, tokens: int) -> None:
        self.pool, self.chain, self.tokens = pool, prompt, 0
        self.blocks = pool.match(prompt, tokens)
        self.hits = self.stored = len(self.blocks)
        pool.touch(self.blocks)
        self.grow(tokens)

    def grow(self, tokens: int) -> None:
        self.tokens += tokens
        self.blocks += self.pool.take(-(-self.tokens // SIZE) - len(self.blocks))
        self.pool.store(self.chain, self.blocks, self.stored, self.tokens // SIZE)
        self.stored = self.tokens // SIZE

    def release(self) -> None:
        self.pool.release(self.blocks)


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(9, SIZE)


def happened(pool: BlockPool) -> str:
    return written(pool.drain())


def test_a_sequence_takes_blocks_from_the_head_and_names_those_that_are_full(pool):
    """Blocks are named when they are full, and a growing sequence names one more at a time."""
    a = Holder(pool, chain("a3"), 10)
    assert (a.blocks, happened(pool), pool.used_fraction) == ([1, 2, 3], "S[a0,a1]<-None", 0.375)
    a.grow(2)
    assert happened(pool) == "S[a2]<-a1"
    a.grow(1)
    assert (a.blocks, happened(pool)) == ([1, 2, 3, 4], "")


def test_a_released_chain_dies_tail_first_and_unnamed_blocks_before_all(pool):
    """The queue after a release holds the unnamed block at its head and the chain reversed at its end."""
    Holder(pool, chain("a3"), 13).release()
    assert queue(pool) == "4 5 6 7 8 3(a2) 2(a1) 1(a0)"


def test_an_aligned_repeat_computes_its_last_block_again(pool):
    """A prompt of exactly k blocks hits k - 1, and its last block is stored a second time under the same hash."""
    Holder(pool, chain("a3"), 13).release()
    pool.drain()
    b = Holder(pool, chain("a3"), 8)
    assert (b.hits, b.blocks, happened(pool)) == (1, [1, 4], "S[a1]<-a0")
    b.release()
    assert queue(pool) == "5 6 7 8 3(a2) 2(a1) 4(a1) 1(a0)"


def test_removing_one_copy_leaves_the_other_in_service(pool):
    """Each copy of a hash is removed on its own, and the one that is left serves hits."""
    Holder(pool, chain("a3"), 13).release()
    Holder(pool, chain("a3"), 8).release()
    pool.drain()
    c = Holder(pool, chain("c6"), 24)
    assert (c.blocks, happened(pool)) == ([5, 6, 7, 8, 3, 2], "R[a2] R[a1] S[c0,c1,c2,c3,c4,c5]<-None")
    assert queue(pool) == "4(a1) 1(a0)"
    assert pool.match(chain("a3"), 12) == [1, 4]


def test_a_reset_is_refused_while_blocks_are_held_and_keeps_the_queue(pool):
    """A reset of a busy cache does nothing; of an idle one it forgets all hashes and leaves the queue's order."""
    Holder(pool, chain("a3"), 13).release()
    Holder(pool, chain("a3"), 8).release()
    c = Holder(pool, chain("c6"), 24)
    pool.drain()
    assert (pool.reset(), happened(pool)) == (False, "")
    c.release()
    assert (pool.reset(), happened(pool)) == (True, "Cleared")
    assert queue(pool) == "4 1 2 3 8 7 6 5"
    assert pool.match(chain("a3"), 12) == []


def test_a_hit_keeps_a_block_from_being_evicted(pool):
    """Touched blocks leave the queue, and a warm idle cache counts as free."""
    Holder(pool, chain("a2"), 9).release()
    assert (pool.free_blocks, pool.used_fraction) == (8, 0.0)
    hits = pool.match(chain("a2"), 9)
    assert pool.unreferenced(hits) == 2
    pool.touch(hits)
    assert (pool.unreferenced(hits), pool.free_blocks) == (0, 6)
    pool.take(6)
    assert pool.match(chain("a2"), 9) == hits


def test_the_younger_copy_may_die_first():
    """Evicting a copy that does not serve leaves the one that does."""
    pool = BlockPool(4, SIZE)
    blocks = pool.take(2)
    pool.store(chain("a1"), blocks[:1], 0, 1)
    pool.store(chain("a1"), blocks[1:], 0, 1)
    pool.release(blocks[1:])
    pool.take(2)
    assert pool.match(chain("a1"), 5) == blocks[:1]


def test_a_prompt_that_is_no_longer_than_a_block_hits_nothing(pool):
    """The last token of a prompt is always computed, so one block is never a hit for itself."""
    Holder(pool, chain("a1"), 4)
    assert (pool.match(chain("a1"), 4), pool.match(chain("a1"), 0)) == ([], [])


@pytest.mark.parametrize(("num_blocks", "block_size", "field"), [(1, 16, "num_blocks"), (8, 0, "block_size")])
def test_a_pool_that_cannot_hold_anything_is_refused(num_blocks, block_size, field):
    """The error names the argument that is too small."""
    with pytest.raises(ValueError, match=field):
        BlockPool(num_blocks, block_size)


def test_the_repr_counts_referenced_and_cached_blocks(pool):
    """A pool shows at a glance how full it is and how warm."""
    Holder(pool, chain("a3"), 10)
    assert repr(pool) == "<BlockPool 3 of 8 blocks referenced, 2 cached>"


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of admissions, growth and releases keeps the pool's laws; a counting model of its events agrees."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(13, SIZE)
        self.holders: list[Holder] = []
        self.copies: dict[int, int] = {}

    @rule(kind=st.sampled_from("abc"), shared=st.integers(0, 3), tokens=st.integers(1, 30))
    def admit(self, kind: str, shared: int, tokens: int) -> None:
        prompt = chain(f"s{shared}", f"{kind}8")
        hits = self.pool.match(prompt, tokens)
        if -(-tokens // SIZE) - len(hits) + self.pool.unreferenced(hits) <= self.pool.free_blocks:
            holder = Holder(self.pool, prompt, 0)
            holder.blocks, holder.hits, holder.stored = hits, len(hits), len(hits)
            self.pool.touch(hits)
            holder.grow(tokens)
            self.holders.append(holder)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def grow(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.holders))
        if holder.tokens < 30 and (holder.tokens % SIZE or self.pool.free_blocks):
            holder.grow(1)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))).release()

    @rule()
    def reset(self) -> None:
        assert self.pool.reset() is (not self.holders)

    @invariant()
    def never_exceeds_its_capacity(self) -> None:
        held = {block for holder in self.holders for block in holder.blocks}
        assert self.pool.usable_blocks - self.pool.free_blocks == len(held)
        assert BlockId(0) not in held

    @invariant()
    def never_evicts_a_held_block(self) -> None:
        free = {block for block, _ in self.pool.queue()}
        for holder in self.holders:
            assert free.isdisjoint(holder.blocks)
            assert len(self.pool.match(holder.chain, 1000)) >= holder.stored

    @invariant()
    def its_events_tell_what_can_be_hit(self) -> None:
        for event in self.pool.drain():
            match event:
                case Stored(hashes):
                    for block_hash in hashes:
                        self.copies[block_hash] = self.copies.get(block_hash, 0) + 1
                case Removed(block_hash):
                    self.copies[block_hash] -= 1
                case Cleared():
                    self.copies.clear()
        for kind in "abc":
            for shared in range(4):
                prompt = chain(f"s{shared}", f"{kind}8")
                hashes = memoryview(prompt).cast("Q")
                reachable = next((n for n, h in enumerate(hashes) if not self.copies.get(h)), len(hashes))
                assert len(self.pool.match(prompt, 1000)) == reachable


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
