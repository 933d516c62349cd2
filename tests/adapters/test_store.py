"""The store as a whole: every way to open it."""

from __future__ import annotations

import os
import signal

import pytest

from kvroute.adapters.index import Namespace
from kvroute.adapters.store import Store, open_store
from kvroute.errors import ConfigError
from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.routing.demand import Promise
from kvroute.routing.replica import ReplicaId
from tests.redis_servers import fresh_name, server, until

NS, R0 = Namespace("model.1"), ReplicaId("http://r0:8000")
CHAIN: PrefixChain = chain_of(tokens_of(range(100)), 1, root_of("m"))


async def use(store: Store) -> None:
    """Do what a router does, once."""
    store.index.join(R0, NS, 1000)
    store.index.record(R0, CHAIN)
    store.ledger.publish({R0: Promise(1, 10, 20)})
    store.account.push([(0, "all|requests", 1)])

    async def is_shared() -> bool:
        match = await store.index.match(NS, [CHAIN])
        return match.source == "index" and match.holdings == ({R0: 100},)

    await until(is_shared)
    assert await store.ledger.reserve(R0, 10, 1000, 10)
    assert await store.account.read() == [(0, "all|requests", 1)]
    stats = store.stats()
    assert stats["records"] == 1
    assert all(isinstance(value, int) for value in stats.values())


async def test_in_memory():
    """A store in memory does everything for this router alone, and says so."""
    store = await open_store(None, memory=True)
    await use(store)
    assert store.describe() == "memory of this router alone"
    await store.close()


async def test_in_a_server_of_its_own():
    """Without a URL the store starts a server; killed, the server comes back and is used again."""
    store = await open_store(None, lookup_deadline_s=1.0)
    try:
        await use(store)
        assert store.describe() == "embedded server (connected)"
        assert store.server is not None
        os.kill(store.server.pid, signal.SIGKILL)

        async def is_local() -> bool:
            return (await store.index.match(NS, [CHAIN])).source == "local"

        async def is_back() -> bool:
            match = await store.index.match(NS, [CHAIN])
            return match.source == "index" and match.holdings == ({R0: 100},)

        await until(is_local)
        await until(is_back)
        assert store.stats()["server_restarts"] == 1
    finally:
        await store.close()


async def test_in_a_given_server():
    """With a URL the store uses that server; two stores of one deployment share what they know."""
    with server() as redis:
        name = fresh_name()
        one = await open_store(redis.url, deployment=name, lookup_deadline_s=1.0, shards=2)
        other = await open_store(redis.url, deployment=name, lookup_deadline_s=1.0, shards=2)
        await use(one)
        other.index.join(R0, NS, 1000)

        async def is_seen() -> bool:
            return (await other.index.match(NS, [CHAIN])).holdings == ({R0: 100},)

        await until(is_seen)
        await until(lambda: other.ledger.others() == {R0: Promise(1, 10, 20)})
        assert redis.url in one.describe()
        await one.close()
        await other.close()


async def test_wrong_settings_start_nothing():
    """A wrong URL, or a server that must not be used, is an error, and no task or process is left."""
    with pytest.raises(ConfigError, match=r"store\.url"):
        await open_store("http://host")
    with server("--maxmemory-policy", "allkeys-lru") as redis, pytest.raises(ConfigError, match="noeviction"):
        await open_store(redis.url)
