"""A feed turns what a stream says into a table, from the beginning or from where another router was."""

from __future__ import annotations

import pytest

from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from tests.adapters.streams import Engine
from tests.kv.encoded import encoded, removed, stored


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
    """What the engine still tells is heard again; where it cannot be asked, what is known becomes suspect."""
    engine = Engine()
    feed = engine.feed()
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    feed.take()
    engine.batches[0] = encoded([stored([1], None, [5], 1)])
    feed.rebuild()
    assert (feed.table.held(chain(5, 6)), feed.table.suspects) == (1, 0)
    assert [(len(change.gone), len(change.added)) for change in feed.take()] == [(8, 8)]
    engine.listeners[0].replay_endpoint = None
    feed.rebuild()
    assert (feed.table.held(chain(5, 6)), feed.table.suspects) == (1, 1)


async def test_a_new_life_is_empty():
    """After a restart nothing of the old life counts."""
    engine = Engine()
    feed = engine.feed()
    await feed.own()
    engine.say(stored([1, 2], None, [5, 6], 1))
    feed.take()
    engine.restart()
    assert (len(feed.table), len(feed.take()[0]), feed.counters.lives) == (0, 2, 1)
