"""The account of all routers: every delta counted once, whatever happens to Redis."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.adapters.shared_account import MemoryAccount, SharedAccount
from kvroute.adapters.store import open_link
from tests.redis_servers import fresh_name, server, until

NOW_S = 1_000_000.0


def life_s(bucket: int) -> int | None:
    return 60 if bucket else None


@asynccontextmanager
async def account(url: str, deployment: str, name: str) -> AsyncIterator[SharedAccount]:
    link = open_link(url)
    await link.start()
    one = SharedAccount(link, deployment=deployment, router_id=name, life_s=life_s, now_wall_s=lambda: NOW_S)
    await one.start()
    try:
        yield one
    finally:
        await one.close()
        await link.close()


async def reads(one: SharedAccount, expected: dict[tuple[int, str], int]) -> None:
    async def agrees() -> bool:
        return {(bucket, field): total for bucket, field, total in await one.read()} == expected

    await until(agrees)


async def test_every_router_reads_the_same_sums():
    """What several routers pushed adds up, and each of them reads all of it."""
    with server() as redis:
        name = fresh_name()
        async with account(redis.url, name, "a") as a, account(redis.url, name, "b") as b:
            a.push([(1_000_000, "all|requests", 1), (0, "all|requests", 1)])
            a.push([(0, "all|requests", 2)])
            b.push([(0, "all|requests", 10), (1_000_000, "tenant=x|requests", 5)])
            for one in (a, b):
                sums = {(1_000_000, "all|requests"): 1, (0, "all|requests"): 13, (1_000_000, "tenant=x|requests"): 5}
                await reads(one, sums)


async def test_large_pushes_arrive_whole():
    """Pushes larger than a batch arrive, each row once."""
    with server() as redis:
        async with account(redis.url, fresh_name(), "a") as a:
            for _ in range(2):
                a.push([(0, f"tenant={i}|requests", i) for i in range(1, 1300)])
            await reads(a, {(0, f"tenant={i}|requests"): 2 * i for i in range(1, 1300)})


async def test_a_redis_that_died_gets_everything_again():
    """While Redis is gone a router reads its own sums; when it is back, empty, the routers' sums are there again."""
    with server() as redis:
        name = fresh_name()
        async with account(redis.url, name, "a") as a, account(redis.url, name, "b") as b:
            a.push([(0, "all|requests", 3)])
            b.push([(0, "all|requests", 4)])
            await reads(a, {(0, "all|requests"): 7})
            await reads(b, {(0, "all|requests"): 7})
            redis.kill()
            await reads(a, {(0, "all|requests"): 3})
            a.push([(0, "all|requests", 1)])
            await reads(a, {(0, "all|requests"): 4})
            redis.start()
            await reads(a, {(0, "all|requests"): 8})
            await reads(b, {(0, "all|requests"): 8})


async def test_buckets_expire_and_all_time_does_not():
    """A bucket is kept in Redis for its life; all time for ever."""
    with server() as redis, redis.client() as client:
        name = fresh_name()
        async with account(redis.url, name, "a") as a:
            a.push([(0, "all|requests", 1), (1_000_000, "all|requests", 1)])
            await reads(a, {(0, "all|requests"): 1, (1_000_000, "all|requests"): 1})
        prefix = f"{{kvr:v1:{name}:account}}a"
        assert client.ttl(f"{prefix}0") == -1
        assert 0 < client.ttl(f"{prefix}1000000") <= 60


async def test_alone_the_sums_are_this_routers_own():
    """In memory, sums are kept until their bucket's life is over."""
    now = [NOW_S]
    one = MemoryAccount(life_s, lambda: now[0])
    one.push([(1_000_000, "all|requests", 1), (0, "all|requests", 1), (1_000_000, "all|requests", 4)])
    assert sorted(await one.read()) == [(0, "all|requests", 1), (1_000_000, "all|requests", 5)]
    now[0] += 61
    assert await one.read() == [(0, "all|requests", 1)]
