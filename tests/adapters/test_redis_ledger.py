"""The ledger: what all routers promised, and reservations that only one of them can get."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.redis_ledger import MemoryLedger, SharedLedger, add_rows, encode_row
from kvroute.adapters.redis_link import Link
from kvroute.adapters.store import open_link
from kvroute.routing.demand import Promise
from kvroute.routing.replica import ReplicaId
from tests.redis_servers import fresh_name, server, until

R0, R1 = ReplicaId("http://r0:8000"), ReplicaId("http://r1:8000#1")


@asynccontextmanager
async def ledger(url: str, deployment: str, name: str) -> AsyncIterator[SharedLedger]:
    link = open_link(url)
    await link.start()
    one = SharedLedger(link, deployment=deployment, router_id=name)
    await one.start()
    try:
        yield one
    finally:
        await one.close()
        await link.close()


async def sees(one: SharedLedger, expected: dict[ReplicaId, Promise]) -> None:
    await until(lambda: one.others() == expected)


async def test_routers_add_up_the_others_promises():
    """Each router sees the sum of what the others published last, and nothing of a router that left."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a, ledger(redis.url, name, "b") as b:
            async with ledger(redis.url, name, "c") as c:
                a.publish({R0: Promise(1, 100, 200)})
                a.publish({R0: Promise(2, 100, 300), R1: Promise(1, 0, 50)})
                b.publish({R0: Promise(1, 10, 20), R1: Promise()})
                await sees(c, {R0: Promise(3, 110, 320), R1: Promise(1, 0, 50)})
                await sees(b, {R0: Promise(2, 100, 300), R1: Promise(1, 0, 50)})
                c.publish({R1: Promise(1, 1, 1)})
                await sees(a, {R0: Promise(1, 10, 20), R1: Promise(1, 1, 1)})
            await sees(a, {R0: Promise(1, 10, 20)})
            b.publish({})
            await sees(a, {})


async def test_a_dead_router_is_forgotten():
    """The row of a router that stopped beating expires."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a:
            link: Link = open_link(redis.url)
            await link.start()
            dying = SharedLedger(link, deployment=name, router_id="b")
            await dying.start()
            dying.publish({R0: Promise(1, 10, 20)})
            await sees(a, {R0: Promise(1, 10, 20)})
            await link.close()  # without a word to Redis
            await dying.close()
            await sees(a, {})


async def test_two_routers_never_reserve_more_than_there_is():
    """Reservations of several routers at once, with what they published, never exceed the limit."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a, ledger(redis.url, name, "b") as b:
            a.publish({R0: Promise(1, 0, 300)})
            await sees(b, {R0: Promise(1, 0, 300)})
            wants = [(one, first + 100 * k) for k in range(1, 7) for one, first in ((a, 300), (b, 0))]
            granted = await asyncio.gather(*(one.reserve(R0, 100, 1000, own) for one, own in wants))
            assert granted.count(True) == 7
            assert await b.reserve(R1, 100, 1000, 100)
            a.publish({R0: Promise(1, 0, 300 + 100 * granted[::2].count(True))})
            b.publish({R0: Promise(1, 0, 100 * granted[1::2].count(True))})
            total = 300 + 100 * granted.count(True)
            await until(lambda: sum(p.kv_tokens for one in (a, b) for p in one.others().values()) == total)
            room, own = 1000 - total, 300 + 100 * granted[::2].count(True)
            assert await a.reserve(R0, room, 1000, own + room)  # the published rows are counted once
            assert not await b.reserve(R0, 1, 1000, total - own + 1)
            b.publish({})
            await sees(a, {})
            assert await a.reserve(R0, 1000 - own - room, 1000, 1000)


async def test_room_that_a_router_gave_back_is_there_at_once():
    """A reservation looks at what the asking router has now, not at its row, which still counts what has ended."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a, ledger(redis.url, name, "b") as b:
            a.publish({R0: Promise(2, 0, 900)})
            await sees(b, {R0: Promise(2, 0, 900)})
            assert await a.reserve(R0, 450, 1000, 900)  # one of two has ended, and goes on at once
            assert not await b.reserve(R0, 450, 1000, 450)
            assert (a.stats.reserved, a.stats.refused) == (1, 0)


async def test_without_redis_everything_is_granted():
    """While Redis is gone reservations are granted, and counted; afterwards the ledger works as before."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a, ledger(redis.url, name, "b") as b:
            a.publish({R0: Promise(1, 0, 1000)})
            await sees(b, {R0: Promise(1, 0, 1000)})
            assert not await b.reserve(R0, 1, 1000, 1)
            redis.kill()
            await sees(b, {})
            assert await b.reserve(R0, 1, 1000, 1)
            assert b.stats.unconfirmed == 1
            redis.start()
            await sees(b, {R0: Promise(1, 0, 1000)})
            async with asyncio.timeout(20):  # a router that is starved for a moment is taken for dead, and comes back
                while await b.reserve(R0, 1, 1000, 1):
                    await asyncio.sleep(0.05)


async def test_alone_the_ledger_is_this_routers_own():
    """In memory there are no others: what this router promised itself decides."""
    one = MemoryLedger()
    one.publish({R0: Promise(1, 0, 900)})
    assert one.others() == {}
    assert [await one.reserve(R0, 300, 1000, own) for own in (900, 1001)] == [True, False]


promises = st.dictionaries(
    st.sampled_from([R0, R1]), st.builds(Promise, *(st.integers(0, 10**9) for _ in range(3))), max_size=2
)


@given(st.lists(promises, max_size=4))
def test_rows_add_up(rows):
    """Rows that were written and read again add up to the promises, whatever they were."""
    expected: dict[ReplicaId, Promise] = {}
    for row in rows:
        for replica, promise in row.items():
            if promise != Promise():
                expected[replica] = expected.get(replica, Promise()) + promise
    assert add_rows([encode_row(row) for row in rows]) == expected


async def test_what_is_told_is_heard_once_by_all_others():
    """Every other router hears it in order, the teller does not, and who comes later hears nothing old."""
    with server() as redis:
        name = fresh_name()
        async with ledger(redis.url, name, "a") as a, ledger(redis.url, name, "b") as b:
            await until(lambda: a.stats.routers == b.stats.routers == 2)
            heard: list[bytes] = []
            for number in range(3):
                a.tell(b"%d" % number)

            def all_came() -> bool:
                heard.extend(b.heard())
                return len(heard) >= 3

            await until(all_came)
            assert heard == [b"0", b"1", b"2"]
            async with ledger(redis.url, name, "c") as c:
                await until(lambda: c.stats.routers == 3)
                b.tell(b"new")
                assert await first_heard(c) == [b"new"]
            assert await first_heard(a) == [b"new"]


async def first_heard(one: SharedLedger) -> list[bytes]:
    """Wait until a router hears something, and return it."""
    heard: list[bytes] = []

    def it_came() -> bool:
        heard.extend(one.heard())
        return bool(heard)

    await until(it_came)
    return heard
