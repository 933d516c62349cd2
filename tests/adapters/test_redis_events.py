"""Owners of event streams in Redis: one at a time, replaced when it dies, refused when it comes late."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvroute.adapters.redis_events import EventWriter, calls_of, doubt_in, pack_snapshot, unpack_snapshot
from kvroute.adapters.redis_index import RedisIndex
from kvroute.kv.cells import Changes, pack_cells
from kvroute.kv.event_sequence import Position
from tests.adapters.streams import Engine
from tests.adapters.test_redis_index import NS, R0, R1, answers
from tests.adapters.test_redis_upkeep import PREFIX, chain
from tests.kv.encoded import removed, stored
from tests.redis_servers import fresh_name, router, server, until


@asynccontextmanager
async def two_routers(url: str, name: str, engine: Engine) -> AsyncIterator[tuple[RedisIndex, RedisIndex]]:
    """Two routers that follow one engine; the first has the lease."""
    async with router(url, name, "a") as a, router(url, name, "b") as b:
        for one in (a, b):
            one.join(R0, NS, 1000)
            one.follow(R0, engine.feed())
            await until(lambda: bool(engine.listeners))
        yield a, b


def owned(one: RedisIndex) -> bool:
    (shard,) = one._shards[NS]
    writer = shard.members[R0].writer
    return writer is not None and writer.feed.is_owner


async def test_one_router_listens_and_all_know():
    """Of two routers one listens to the engine; both know what it holds."""
    with server() as redis:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (a, b):
            engine.say(stored([1, 2, 3], None, [5, 6, 7], 1))
            await answers(a, chain(5, 6, 7), {R0: 3})
            await answers(b, chain(5, 6, 7), {R0: 3})
            assert (len(engine.listeners), owned(a), owned(b)) == (1, True, False)
            b.record(R0, chain(9))
            a.record(R0, chain(9))
            await asyncio.sleep(0.3)
            (shard,) = a._shards[NS]
            assert not shard.is_feeding


async def test_streams_are_shared_out_evenly():
    """Two routers own one of two streams each."""
    with server() as redis:
        name = fresh_name()
        engines = {R0: Engine(), R1: Engine()}
        async with router(redis.url, name, "a") as a, router(redis.url, name, "b") as b:
            for one in (a, b):
                for replica, engine in engines.items():
                    one.join(replica, NS, 100)
                    one.follow(replica, engine.feed())
            await until(lambda: a.stats.owned_replicas == b.stats.owned_replicas == 1)
            await until(lambda: all(len(engine.listeners) == 1 for engine in engines.values()))


async def test_changes_do_not_wait_for_a_snapshot_to_be_stored():
    """A snapshot is stored with the next round of the upkeep; what the engine says meanwhile is written at once."""
    with server() as redis:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (a, b):
            engine.say(stored([1], None, [5], 1))
            await answers(b, chain(5), {R0: 1})
            (shard,) = a._shards[NS]
            writer = shard.members[R0].writer
            a._task.cancel()  # no further round
            writer.wants_snapshot = True
            engine.say(stored([2], 1, [6], 1))
            await until(lambda: writer.snapshot is not None)
            engine.say(stored([3], 2, [7], 1), removed(1))
            await until(lambda: not engine_waits(writer))
            holdings = [await a.match(NS, [one]) for one in (chain(5, 6, 7), chain(5))]
            assert [match.holdings for match in holdings] == [({},), ({},)]
            assert writer.snapshot is not None
            assert writer.is_written


def engine_waits(writer: EventWriter) -> bool:
    """Whether something that the engine has said is not in Redis yet."""
    return writer.is_scheduled or writer.is_under_way or bool(writer.waiting)


@pytest.mark.parametrize("is_kept", [True, False])
async def test_a_dead_owner_is_replaced(is_kept):
    """When the owner dies without a word, another goes on from its snapshot, or from what the engine keeps, and what
    happened in between is not missed."""
    with server() as redis, redis.client() as client:
        engine, name = Engine(), fresh_name()
        async with two_routers(redis.url, name, engine) as (a, b):
            engine.say(stored([1, 2, 3], None, [5, 6, 7], 1), stored([9], None, [9], 1))
            await answers(b, chain(5, 6, 7), {R0: 3})
            if is_kept:
                (shard,) = a._shards[NS]
                shard.members[R0].writer.snapshot_due_s = 0.0
                await until(lambda: bool(client.keys(PREFIX.format(name, NS) + "q*")))
                engine.kept_from = len(engine.batches)
            a._task.cancel()
            a._link.run = lambda *_: False
            engine.listeners.clear()
            engine.say(removed(3), removed(9))
            engine.say(stored([4], 2, [8], 1))
            await until(lambda: bool(engine.listeners))
            for one, held in ((chain(5, 6, 7), {R0: 2}), (chain(5, 6, 8), {R0: 3}), (chain(9), {})):
                await answers(b, one, held)


@pytest.mark.parametrize("is_restarted", [True, False])
async def test_what_a_dead_owner_wrote_last_does_not_outlive_what_it_was_written_of(is_restarted):
    """The engine restarts while nobody listens, or no longer tells what came after the snapshot: the blocks that the
    dead owner wrote after it, which the successor never hears of, are not held."""
    with server() as redis, redis.client() as client:
        engine, name = Engine(), fresh_name()
        async with two_routers(redis.url, name, engine) as (a, b):
            engine.say(stored([1], None, [5], 1))
            await answers(b, chain(5), {R0: 1})
            (shard,) = a._shards[NS]
            shard.members[R0].writer.snapshot_due_s = 0.0
            await until(lambda: bool(client.keys(PREFIX.format(name, NS) + "q*")))
            engine.say(stored([2], 1, [6], 1))
            await answers(b, chain(5, 6), {R0: 2})
            a._task.cancel()
            a._link.run = lambda *_: False
            engine.listeners.clear()
            if is_restarted:
                engine.restart()
            else:
                engine.lose(removed(2))
            engine.say(stored([4], None, [8], 1))
            engine.say(stored([5], 4, [9], 1))
            if is_restarted:
                engine.say(stored([1], None, [5], 1))
            await until(lambda: bool(engine.listeners))
            await answers(b, chain(8, 9), {R0: 2})
            await answers(b, chain(5, 6), {R0: 1})


async def test_what_only_a_dead_owner_was_taught_does_not_outlive_it():
    """After lost events deliveries teach the owner, beyond its snapshot too. The successor, who never hears of these,
    holds nothing that only they told of."""
    with server() as redis, redis.client() as client:
        engine, name = Engine(), fresh_name()
        async with two_routers(redis.url, name, engine) as (a, b):
            engine.say(stored([1], None, [5], 1))
            engine.lose(stored([2], 1, [6], 1))
            engine.say(stored([3], 1, [7], 1))
            await answers(b, chain(5, 7), {R0: 2})
            (shard,) = a._shards[NS]
            shard.members[R0].writer.snapshot_due_s = 0.0
            await until(lambda: bool(client.keys(PREFIX.format(name, NS) + "q*")))
            a.delivered(R0, chain(8, 9), 2)
            await answers(b, chain(8, 9), {R0: 2})
            a._task.cancel()
            a._link.run = lambda *_: False
            engine.listeners.clear()
            await until(lambda: bool(engine.listeners))
            await answers(b, chain(8, 9), {})
            await answers(b, chain(5, 7), {R0: 2})


async def test_a_deposed_owner_is_refused():
    """What a router writes after another has taken its lease does not count."""
    with server() as redis, redis.client() as client:
        engine, name = Engine(), fresh_name()
        async with two_routers(redis.url, name, engine) as (a, _b):
            engine.say(stored([1], None, [5], 1))
            await answers(a, chain(5), {R0: 1})
            prefix = PREFIX.format(name, NS)
            slot = client.hget(f"{prefix}r", R0).partition(b".")[0]
            client.hset(f"{prefix}o", slot, "99:b")
            engine.say(stored([2], 1, [6], 1))
            await until(lambda: not owned(a))
            slot = client.hget(f"{prefix}r", R0).partition(b".")[0]  # the other one may have begun another life by now
            assert client.hget(f"{prefix}o", slot) == b"99:b"


async def test_an_emptied_redis_gets_the_whole_table_again():
    """A Redis that lost everything has it again, though the engine said nothing meanwhile."""
    with server() as redis, redis.client() as client:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (a, b):
            engine.say(stored([1, 2, 3], None, [5, 6, 7], 1))
            await answers(b, chain(5, 6, 7), {R0: 3})
            client.flushall()
            await until(lambda: bool(client.keys("*b*")))
            await answers(a, chain(5, 6, 7), {R0: 3})
            await answers(b, chain(5, 6, 7), {R0: 3})
            redis.kill()
            engine.say(removed(3))
            redis.start()
            await answers(a, chain(5, 6, 7), {R0: 2})
            await answers(b, chain(5, 6, 7), {R0: 2})


async def test_own_placements_do_not_count_beside_events():
    """While a router has yet to feed Redis again, what it sent counts, but not to a replica whose events are known."""
    with server() as redis:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (a, _b):
            a.record(R0, chain(8, 9))
            a.delivered(R0, chain(8, 9), 0)
            engine.say(stored([1], None, [5], 1))
            await answers(a, chain(5), {R0: 1})
            await answers(a, chain(8, 9), {})
            (shard,) = a._shards[NS]
            shard.mark_stale(shard.members[R0])
            assert a.is_feeding
            await answers(a, chain(8, 9), {})


async def test_other_routers_tell_the_owner_what_was_delivered():
    """After lost events, a delivery that another router saw corrects the owner's table."""
    with server() as redis:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (_a, b):
            engine.say(stored([1, 2, 3], None, [5, 6, 7], 1))
            await answers(b, chain(5, 6, 7), {R0: 3})
            engine.lose(removed(3))
            (shard,) = b._shards[NS]
            await until(lambda: doubt_in(shard.fed.get(int(shard.members[R0].slot), b"")) == 1.0)
            b.delivered(R0, chain(5, 6, 7), 2)
            await answers(b, chain(5, 6, 7), {R0: 2})


async def test_a_replica_that_fell_silent_holds_what_it_was_sent():
    """While a replica says nothing although it serves, sending counts; when it speaks again, its events do."""
    with server() as redis:
        engine = Engine()
        async with two_routers(redis.url, fresh_name(), engine) as (a, b):
            engine.say(stored([1], None, [5], 1))
            await answers(b, chain(5), {R0: 1})
            (shard,) = a._shards[NS]
            shard.members[R0].writer.feed.is_silent = True
            await until(lambda: not shard.is_fed(shard.members[R0]))
            for one in (a, b):
                await until(lambda one=one: not one.is_feeding)
            a.record(R0, chain(7, 8))
            await answers(b, chain(7, 8), {R0: 2})
            engine.say(stored([2], 1, [6], 1))
            await answers(b, chain(5, 6), {R0: 2})
            await answers(b, chain(7, 8), {})


def test_no_call_writes_too_much():
    """Changes are cut into bounded calls in order; only the last one says how far the stream was read."""
    changes = [Changes(0, pack_cells(range(300)), pack_cells(range(300, 1000))), Changes(1, b"", pack_cells([5]))]
    calls = calls_of(changes, b"state")
    assert [call.state for call in calls] == [b""] * (len(calls) - 1) + [b"state"]
    parts = [call.arguments[at : at + 3] for call in calls for at in range(0, len(call.arguments), 3)]
    for tier, change in enumerate(changes):
        assert b"".join(part[1] for part in parts if part[0] == tier) == change.gone
        assert b"".join(part[2] for part in parts if part[0] == tier) == change.added
    assert max(sum(len(a) for a in call.arguments if isinstance(a, bytes)) for call in calls) <= 256 * 8
    assert calls_of([], b"state") == []


@pytest.mark.parametrize("position", [None, Position(2**63, 2**64 - 1)])
def test_a_snapshot_says_where_it_was_taken(position):
    """Table, position and last delivery come back together, whatever bytes the table has."""
    assert unpack_snapshot(pack_snapshot(position, (7, 1), b"a b 1.2")) == (position, (7, 1), b"a b 1.2")
    assert [doubt_in(state) for state in (b"-", b"", b"5.ab.", b"5.ab.0", b"5.ab.50")] == [None, None, None, 0.0, 0.5]
