"""What happens in the background: feeding again, snapshots, sweeping."""

from __future__ import annotations

import pytest

from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.routing.replica import ReplicaId
from tests.adapters.test_redis_index import NS, R0, R1, answers
from tests.redis_servers import fresh_name, router, server, until

PREFIX = "{{kvr:v1:{}:{}:0}}"


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


@pytest.mark.slow
async def test_dead_bits_are_swept_and_slots_used_again():
    """The bits of an ended life go one by one, then its slot may stand for another replica."""
    with server() as redis, redis.client() as client:
        name = fresh_name()
        async with router(redis.url, name, "a") as a:
            prefix = PREFIX.format(name, NS)
            a.join(R0, NS, 2000)
            a.join(R1, NS, 2000)
            a.record(R0, chain(*range(1500)))
            a.record(R1, chain(*range(20)))
            await answers(a, chain(*range(1500)), {R0: 1500, R1: 20})
            buckets = len(client.keys(f"{prefix}b*"))
            slot = client.hget(f"{prefix}r", R0).partition(b".")[0]
            a.leave(R0)
            await until(lambda: len(client.keys(f"{prefix}b*")) == 2 < buckets)
            await until(lambda: not client.exists(f"{prefix}y", f"{prefix}d"))
            third = ReplicaId("r2")
            a.join(third, NS, 100)
            await until(lambda: client.hexists(f"{prefix}r", third))
            assert client.hget(f"{prefix}r", third).partition(b".")[0] == slot
            await answers(a, chain(*range(1500)), {R1: 20})


async def test_the_log_is_cut_to_the_snapshot_that_a_successor_loads():
    """A log that has grown is replaced by a snapshot; the next owner goes on from it and evicts in the right order."""
    with server() as redis, redis.client() as client:
        name = fresh_name()
        prefix = PREFIX.format(name, NS)
        chains = [chain(k, *range(4000)) for k in range(40)]
        async with router(redis.url, name, "a") as a:
            a.join(R0, NS, 6000)
            for one in chains:
                a.record(R0, one)
            await until(lambda: bool(client.keys(f"{prefix}p*")))
            (log,) = client.keys(f"{prefix}s*")
            await until(lambda: client.xlen(log) < len(chains))
            await answers(a, chains[-1], {R0: 4001})
            await answers(a, chains[-2], {R0: 1999})
        async with router(redis.url, name, "b") as b:
            b.join(R0, NS, 6000)
            await until(lambda: b.stats.owned_replicas == 1)
            b.record(R0, chain(99, *range(1999)))
            await answers(b, chains[-1], {R0: 4000})
            await answers(b, chains[-2], {})


async def test_an_emptied_redis_is_registered_with_again():
    """A Redis that lost everything while its connections stayed is noticed, and fed again."""
    with server() as redis, redis.client() as client:
        async with router(redis.url, fresh_name(), "a") as a:
            a.join(R0, NS, 100)
            a.record(R0, chain(1, 2, 3))
            await answers(a, chain(1, 2, 3), {R0: 3})
            client.flushall()
            await until(lambda: bool(client.keys("*b*")))
            await answers(a, chain(1, 2, 3), {R0: 3})


async def test_a_redis_with_old_data_is_not_believed():
    """A Redis that came back with an older state is another one: what it remembers is not anyone's any more."""
    with server("--save", "3600 1") as redis, redis.client() as client:
        async with router(redis.url, fresh_name(), "a") as a:
            a.join(R0, NS, 100)
            a.record(R0, chain(1, 2, 3))
            await answers(a, chain(1, 2, 3), {R0: 3})
            client.save()
            a.correct(R0, chain(1, 2, 3), 1)
            await answers(a, chain(1, 2, 3), {R0: 1})
            redis.kill()
            await answers(a, chain(1, 2, 3), {R0: 1}, "local")
            redis.start()
            await answers(a, chain(1, 2, 3), {R0: 1})
            await until(lambda: not a.is_feeding)
            await answers(a, chain(1, 2, 3), {R0: 1})
