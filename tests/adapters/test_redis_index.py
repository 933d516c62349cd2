"""The index in Redis where it differs from one in memory: several routers, and a Redis that dies."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from typing import Any

from kvroute.adapters.index import Namespace
from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.redis_link import Link
from kvroute.adapters.redis_wire import Argument, Done
from kvroute.adapters.store import open_link
from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.routing.replica import ReplicaId
from tests.redis_servers import fresh_name, router, server, until

NS = Namespace("model.1")
R0, R1 = ReplicaId("http://r0:8000"), ReplicaId("http://r1:8000")


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


async def answers(index: RedisIndex, link: PrefixChain, expected: dict[ReplicaId, int], source: str = "index") -> None:
    async def agrees() -> bool:
        match = await index.match(NS, [link])
        return dict(match.holdings[0]) == expected and match.source == source

    await until(agrees)


async def test_routers_see_each_others_placements():
    """What one router sent to a replica is found by the others, and evicted by what all of them sent."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a") as a, router(redis.url, name, "b") as b:
            for one in (a, b):
                one.join(R0, NS, 100)
            a.record(R0, chain(1, *range(60)))
            await answers(b, chain(1, *range(60)), {R0: 61})
            b.record(R0, chain(2, *range(60)))
            await answers(a, chain(2, *range(60)), {R0: 61})
            await answers(a, chain(1, *range(60)), {R0: 39})
            await answers(b, chain(1, *range(60)), {R0: 39})


async def test_a_restart_seen_by_both_routers_is_one_restart():
    """Both routers notice a replica's restart; what the first one placed since then is not forgotten by the second."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a") as a, router(redis.url, name, "b") as b:
            for one in (a, b):
                one.join(R0, NS, 100)
                one.record(R0, chain(1, 2, 3))
            await answers(b, chain(1, 2, 3), {R0: 3})
            a.leave(R0)
            a.join(R0, NS, 100)
            a.record(R0, chain(7, 8))
            await answers(a, chain(7, 8), {R0: 2})
            await answers(b, chain(7, 8), {R0: 2})
            b.record(R0, chain(5))
            b.leave(R0)
            b.join(R0, NS, 100)
            for one in (a, b):
                await answers(one, chain(7, 8), {R0: 2})
                await answers(one, chain(1, 2, 3), {})


async def test_a_late_write_of_an_old_life_changes_nothing():
    """A router that has not noticed a restart cannot bring back what the replica held before it."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a") as a, router(redis.url, name, "b") as b:
            for one in (a, b):
                one.join(R0, NS, 100)
            b.record(R0, chain(1, 2, 3))
            await answers(a, chain(1, 2, 3), {R0: 3})
            a.leave(R0)
            a.join(R0, NS, 100)
            b.record(R0, chain(1, 2, 3, 4))  # with the token of the old life, or not at all
            b.correct(R0, chain(1, 2, 3, 4), 0)
            a.record(R0, chain(9))
            await answers(a, chain(9), {R0: 1})
            await answers(a, chain(1, 2, 3, 4), {})
            await answers(b, chain(9), {R0: 1})


async def test_a_killed_redis_is_used_again_and_fed_again():
    """While Redis is gone this router's own placements answer; when it is back, empty, it gets them again."""
    with server() as redis:
        async with router(redis.url, fresh_name(), "a") as a:
            a.join(R0, NS, 1000)
            a.join(R1, NS, 1000)
            a.record(R0, chain(*range(300)))
            await answers(a, chain(*range(300)), {R0: 300})
            redis.kill()
            await answers(a, chain(*range(300)), {R0: 300}, "local")
            a.record(R1, chain(*range(200)))
            await answers(a, chain(*range(300)), {R0: 300, R1: 200}, "local")
            assert a.stats.local_answers > 0
            redis.start()
            await answers(a, chain(*range(300)), {R0: 300, R1: 200})
            await until(lambda: not a.is_feeding)
            await answers(a, chain(*range(300)), {R0: 300, R1: 200})
            assert a.stats.reconnects >= 1


async def test_a_silent_redis_costs_one_deadline_and_is_used_again():
    """A Redis that falls silent makes one lookup late; the next are local at once, and later it is used again."""
    with server() as redis:
        async with router(redis.url, fresh_name(), "a", deadline_s=0.05) as a:
            a.join(R0, NS, 1000)
            a.record(R0, chain(1, 2))
            await answers(a, chain(1, 2), {R0: 2})
            assert redis.process is not None
            os.kill(redis.process.pid, signal.SIGSTOP)
            await answers(a, chain(1, 2), {R0: 2}, "local")
            late = a.stats.late
            assert late >= 1
            for _ in range(50):
                assert (await a.match(NS, [chain(1, 2)])).source == "local"
            assert a.stats.late == late
            os.kill(redis.process.pid, signal.SIGCONT)
            await answers(a, chain(1, 2), {R0: 2})


class Company:
    """Whether a router has any, as its ledger would say."""

    def __init__(self, *, is_alone: bool = True) -> None:
        self.is_alone = is_alone

    def __call__(self) -> bool:
        return self.is_alone


async def test_a_router_alone_from_the_start_asks_nobody():
    """It answers from memory, at once; what it placed is in Redis all the same, whole and within the capacity."""
    with server() as redis:
        name, company = fresh_name(), Company()
        async with router(redis.url, name, "a", is_alone=company) as a:
            a.join(R0, NS, 100)
            await until(lambda: a.is_feeding is False)
            for prompt in range(20):
                a.record(R0, chain(prompt, *range(59)))
                match = await a.match(NS, [chain(prompt, *range(59), 7)])
                assert (dict(match.holdings[0]), match.source) == ({R0: 60}, "index")
            a.record(R0, chain(*range(90)))
            assert (a.stats.own_answers, a.stats.lookups, a.stats.local_answers) == (20, 20, 0)
            async with router(redis.url, name, "b") as b:
                b.join(R0, NS, 100)
                await answers(b, chain(*range(90)), {R0: 90})
                await answers(b, chain(19, *range(59)), {R0: 10})
                await answers(b, chain(18, *range(59)), {})


async def test_a_router_that_gets_company_asks_from_then_on():
    """Others' placements are found as soon as it knows of them, and also when they have gone again."""
    with server() as redis:
        name, company = fresh_name(), Company()
        async with router(redis.url, name, "a", is_alone=company) as a:
            a.join(R0, NS, 100)
            await until(lambda: a.is_feeding is False)
            a.record(R0, chain(1, 2, 3))
            assert dict((await a.match(NS, [chain(1, 2, 3)])).holdings[0]) == {R0: 3}
            async with router(redis.url, name, "b") as b:
                b.join(R0, NS, 100)
                await answers(b, chain(1, 2, 3), {R0: 3})
                b.record(R0, chain(4, 5))
                company.is_alone = False
                await answers(a, chain(4, 5), {R0: 2})
            company.is_alone = True
            own = a.stats.own_answers
            for _ in range(3):
                await answers(a, chain(4, 5), {R0: 2})
            assert a.stats.own_answers == own


async def test_a_router_that_comes_after_others_asks():
    """Who finds an index that others have written does not know all of it, though it may be alone now."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a") as a:
            a.join(R0, NS, 100)
            a.record(R0, chain(1, 2, 3))
            await answers(a, chain(1, 2, 3), {R0: 3})
        async with router(redis.url, name, "b", is_alone=Company()) as b:
            b.join(R0, NS, 100)
            await answers(b, chain(1, 2, 3), {R0: 3})
            assert b.stats.own_answers == 0


async def test_a_router_alone_feeds_a_redis_that_was_killed():
    """It says that Redis is gone; an empty one gets all again, and again nobody is asked."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a", is_alone=Company()) as a:
            a.join(R0, NS, 1000)
            a.record(R0, chain(*range(300)))
            await answers(a, chain(*range(300)), {R0: 300})
            redis.kill()
            await answers(a, chain(*range(300)), {R0: 300}, "local")
            redis.start()
            await answers(a, chain(*range(300)), {R0: 300})
            await until(lambda: not a.is_feeding)
            own = a.stats.own_answers
            await answers(a, chain(*range(300)), {R0: 300})
            assert a.stats.own_answers > own
            async with router(redis.url, name, "b") as b:
                b.join(R0, NS, 1000)
                await answers(b, chain(*range(300)), {R0: 300})


class Mumbling:
    """A real link of which the replies to lookups can be garbled."""

    def __init__(self, link: Link) -> None:
        self._link = link
        self.garbled: object = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    def run(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> bool:
        is_lookup = name == "lookup" and self.garbled is not None
        return self._link.run(name, prefix, arguments, (lambda _: done(self.garbled)) if is_lookup else done)


async def test_an_answer_that_cannot_be_read_is_answered_locally():
    """Whatever Redis says to a lookup, the caller gets an answer: the router's own, and the error is counted."""
    with server() as redis:
        link = Mumbling(open_link(redis.url))
        await link.start()
        index = RedisIndex(link, deployment=fresh_name(), router_id="a", deadline_s=5.0)
        await index.start()
        index.join(R0, NS, 100)
        index.record(R0, chain(1, 2))
        await answers(index, chain(1, 2), {R0: 2})
        errors = index.stats.errors
        for link.garbled in (b"OK", [], [7, 7, 7], [b"", None, 1, b"x", b"y"]):
            await answers(index, chain(1, 2), {R0: 2}, "local")
        assert index.stats.errors > errors
        link.garbled = None
        await answers(index, chain(1, 2), {R0: 2})
        await index.close()
        await link.close()


async def test_another_router_takes_an_owner_over():
    """When the router that looks after a replica dies, another one does: capacity bounds what is held as before."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "b") as b:
            link = open_link(redis.url)
            await link.start()
            a = RedisIndex(link, deployment=name, router_id="a")
            await a.start()
            a.join(R0, NS, 100)
            await until(lambda: a.stats.owned_replicas == 1)
            b.join(R0, NS, 100)
            a.record(R0, chain(1, *range(60)))
            await answers(b, chain(1, *range(60)), {R0: 61})
            await link.close()  # it dies without handing its lease back
            await a.close()
            b.record(R0, chain(2, *range(60)))
            await until(lambda: b.stats.owned_replicas == 1)
            await answers(b, chain(1, *range(60)), {R0: 39})
            await answers(b, chain(2, *range(60)), {R0: 61})


async def test_owners_share_the_replicas_evenly():
    """Two routers look after about half of the replicas each, and one alone after all of them."""
    with server() as redis:
        name = fresh_name()
        async with router(redis.url, name, "a") as a:
            replicas = [ReplicaId(f"r{i}") for i in range(6)]
            for replica in replicas:
                a.join(replica, NS, 100)
            await until(lambda: a.stats.owned_replicas == 6)
            async with router(redis.url, name, "b") as b:
                for replica in replicas:
                    b.join(replica, NS, 100)
                await until(lambda: (a.stats.owned_replicas, b.stats.owned_replicas) == (3, 3))
            await until(lambda: a.stats.owned_replicas == 6)
