"""A feed turns what a stream says into a table, from the beginning or from where another router was."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.kv.engine_hashes import BLOCKS_PER_CAPACITY, BLOCKS_SPARE, EngineHashes
from kvroute.kv.events import REPORT_SESSION
from tests.adapters.streams import Engine
from tests.kv.encoded import STORED, cleared, encoded, removed, stored


def chain(*ids: int) -> PrefixChain:
    return chain_of(tokens_of(ids), 1, root_of("m"))


async def test_a_feed_that_is_not_owned_hears_nothing():
    """Only the owner listens, and only while it is one."""
    engine = Engine()
    feed = engine.feed()
    engine.say(stored([1, 2], None, [5, 6], 1))
    assert (feed.is_owner, feed.is_exact) == (False, False)
    await feed.own()
    assert (feed.table.held(chain(5, 6)), feed.is_exact, feed.position.seq) == (2, True, 0)
    await feed.release()
    engine.say(removed(2))
    assert (feed.is_exact, feed.position, len(feed.table)) == (False, None, 0)


async def test_a_successor_goes_on_from_the_snapshot():
    """With a predecessor's table and position, only what came after it is heard."""
    engine = Engine()
    first, second = engine.feed(), engine.feed()
    await first.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    snapshot, position = first.table.pack(), first.position
    await first.release()
    engine.say(removed(2))
    engine.kept_from = 1
    await second.own(snapshot, position)
    assert (second.table.held(chain(5, 6)), second.counters.batches, second.take()[0].added) == (1, 1, b"")


async def test_a_snapshot_that_cannot_be_read_changes_nothing():
    """The error is the caller's to see; the feed is then owned by nobody."""
    feed = Engine().feed()
    with pytest.raises(ValueError, match=r".+"):
        await feed.own(b"older", None)
    assert not feed.is_owner


async def test_a_broken_batch_is_a_lost_one():
    """What cannot be read is counted and makes what is known suspect; the feed goes on."""
    engine = Engine()
    feed = engine.feed()
    told = []
    feed.changed = lambda: told.append(1)
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    engine.listeners[0].sink.batch(1, b"\xc1")
    assert (feed.counters.malformed, feed.counters.gaps, feed.table.suspects) == (1, 1, 2)
    engine.say(removed(2))
    feed.delivered(chain(5, 6), 1)
    assert (feed.table.held(chain(5, 6)), feed.table.suspects, len(told)) == (1, 0, 4)


async def test_a_table_that_was_wrong_is_rebuilt():
    """What the engine still tells is heard again; where it cannot be asked, what is known becomes suspect. Snapshots
    from before are of no use then: the store is to begin anew."""
    engine = Engine()
    feed = engine.feed()
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    feed.take()
    engine.batches[0] = encoded([stored([1], None, [5], 1)])
    feed.rebuild()
    assert (feed.table.held(chain(5, 6)), feed.table.suspects, feed.is_astray) == (1, 0, True)
    assert [(len(change.gone), len(change.added)) for change in feed.take()] == [(8, 8)]
    engine.listeners[0].replay_endpoint = None
    feed.rebuild()
    assert (feed.table.held(chain(5, 6)), feed.table.suspects) == (1, 1)


async def test_a_table_that_fails_is_given_up():
    """A batch that was taken in half leaves nothing that is believed; what comes after it is heard."""
    engine = Engine()
    feed = engine.feed()
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    del feed.table._names[-1:]  # no event is known to do that: there is no mistake to be had
    feed.table._blocks[2] = 10**6
    with pytest.raises(IndexError):
        engine.say(removed(1), removed(2))
    assert (len(feed.table), len(feed.table.tree.cells[0]), feed.is_astray) == (0, 0, True)
    engine.say(stored([3], None, [7], 1))
    assert feed.table.held(chain(7)) == 1


async def test_a_new_life_is_empty():
    """After a restart nothing of the old life counts."""
    engine = Engine()
    feed = engine.feed()
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    feed.take()
    engine.restart()
    assert (len(feed.table), len(feed.take()[0]), feed.counters.lives) == (0, 2, 1)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=4)
anything = st.recursive(scalars | st.binary(max_size=8), lambda inner: st.lists(inner, max_size=3), max_leaves=6)
names = st.lists(st.integers(-3, 12) | st.binary(max_size=2), max_size=4)
fields: dict[str, st.SearchStrategy[Any]] = {  # what might be there, so that much of it is taken for an event
    "block_hashes": names,
    "parent_block_hash": st.none() | st.integers(-3, 12),
    "token_ids": st.lists(st.integers(0, 2), max_size=8),
    "block_size": st.integers(-1, 3),
    "extra_keys": st.none() | st.lists(st.none() | st.lists(st.sampled_from(["a", 1, None, ["i", 0]]), max_size=3)),
    "group_idx": st.none() | st.integers(-1, 2),
    "kv_cache_spec_kind": st.none() | st.sampled_from(["full_attention", "sliding_window", "mamba", "new"]),
    "kv_cache_spec_sliding_window": st.none() | st.integers(-1, 4),
    "medium": st.sampled_from([None, "GPU", "CPU", "disk"]),
    "lora_id": st.none() | st.integers(0, 2),
    "session_id": st.none() | st.sampled_from(["s", REPORT_SESSION]),
}
kinds = st.sampled_from(["BlockStored", "BlockRemoved", "BlockRemoved", "AllBlocksCleared", "New"])


@st.composite
def senseless(draw: st.DrawFn) -> bytes:
    """Return a batch of events of the right names and the wrong sense, in either form."""
    events: list[Any] = []
    for _ in range(draw(st.integers(1, 3))):
        kind, wrong = draw(kinds), draw(st.sampled_from([None, None, None, *fields]))
        body = {name: draw(anything if name == wrong else value) for name, value in fields.items()}
        if draw(st.booleans()):
            events.append([kind, *(body.get(name) for name, _ in STORED[: draw(st.integers(0, len(STORED)))])])
        else:
            events.append({"type": kind} | body)
    return msgspec.msgpack.encode([0.5, events, draw(st.none() | st.integers(0, 1))])


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.lists(senseless() | st.binary(max_size=60), min_size=1, max_size=12))
def test_whatever_is_sent_the_feed_goes_on(payloads):
    """Noise, and events without sense in any form, never stop a feed nor leave it in a state that cannot be handed on;
    what is told of it adds up, and a good batch after a reset is taken as ever."""

    async def scenario() -> None:
        engine = Engine()
        feed = engine.feed(capacity_blocks=10)
        await feed.own()
        told: dict[int, set[int]] = {tier: set() for tier in range(4)}
        for seq, payload in enumerate(payloads):
            engine.listeners[0].sink.batch(seq, payload)
            feed.delivered(chain(0, 1, 2), seq % 4)
            if seq % 3 == 0:
                feed.has_told(chain(0, 1))
                for change in feed.take():
                    told[change.tier] -= set(memoryview(change.gone).cast("Q"))
                    told[change.tier] |= set(memoryview(change.added).cast("Q"))
            if seq % 5 == 4:
                feed.table = EngineHashes.unpack(feed.table.pack(), "m", 10)
                told = {tier: set() for tier in range(4)} | {
                    change.tier: set(memoryview(change.added).cast("Q")) for change in feed.table.everything()
                }
            feed.describe()
            assert len(feed.table) <= BLOCKS_PER_CAPACITY * 10 + BLOCKS_SPARE
        for change in feed.take():
            told[change.tier] = told[change.tier] - set(memoryview(change.gone).cast("Q"))
            told[change.tier] |= set(memoryview(change.added).cast("Q"))
        assert [told[tier] for tier in range(3)] == [set(cells) for cells in feed.table.tree.cells]
        assert told[3] == set(feed.table.ends.cells)
        size = feed.table.block_size or 1
        engine.listeners[0].sink.batch(
            99, encoded([cleared(), stored([1, 2], None, [5] * 2 * size, size, group_idx=7)])
        )
        assert feed.is_exact
        assert feed.table.held(chain_of(tokens_of([5] * 2 * size), size, root_of("m"))) == 2

    asyncio.run(scenario())
