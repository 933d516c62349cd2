"""The shared state of a deployment, put together: link, index, ledger, account, and an embedded server if needed."""

from __future__ import annotations

import random
import secrets
from collections.abc import Mapping
from contextlib import AsyncExitStack

import msgspec

from kvroute.adapters.embedded import EmbeddedServer
from kvroute.adapters.index import Index, MemoryIndex
from kvroute.adapters.redis_cluster import ClusterLink
from kvroute.adapters.redis_index import DEADLINE_S, RedisIndex
from kvroute.adapters.redis_ledger import Ledger, MemoryLedger, SharedLedger
from kvroute.adapters.redis_link import Link, ServerLink
from kvroute.adapters.redis_sentinel import finder
from kvroute.adapters.redis_url import parse_redis_url
from kvroute.adapters.shared_account import AccountStore, MemoryAccount, SharedAccount
from kvroute.routing.account import bucket_life_s


class Store:
    """What routers of a deployment share. Made by `open_store` or `memory_store`, already started."""

    def __init__(
        self,
        index: Index,
        ledger: Ledger,
        account: AccountStore,
        *,
        link: Link | None = None,
        server: EmbeddedServer | None = None,
    ) -> None:
        self.index = index
        self.ledger = ledger
        self.account = account
        self.link = link
        self.server = server
        self._stack = AsyncExitStack()

    async def start(self) -> None:
        """Start the parts, in order; the server and the link run already."""
        for part in (self.index, self.ledger, self.account):
            await part.start()
            self._stack.push_async_callback(part.close)

    async def close(self) -> None:
        """Close the parts in reverse order, then the link, then the embedded server."""
        await self._stack.aclose()
        if self.link is not None:
            await self.link.close()
        if self.server is not None:
            await self.server.close()

    def describe(self) -> str:
        """Say in one line where the state lives, and whether it can be reached."""
        if self.link is None:
            return "memory of this router alone"
        state = "connected" if self.link.is_up else "not reachable: routing on what this router placed itself"
        return f"{'embedded server' if self.server else self.link.describe} ({state})"

    def stats(self) -> Mapping[str, int]:
        """Return all counters by name."""
        figures: dict[str, int] = dict(msgspec.structs.asdict(self.index.stats))
        figures.update((f"ledger_{name}", n) for name, n in msgspec.structs.asdict(self.ledger.stats).items())
        if self.link is not None:
            figures.update((f"link_{name}", n) for name, n in msgspec.structs.asdict(self.link.stats).items())
        if self.server is not None:
            figures["server_restarts"] = self.server.restarts
        return figures


def memory_store() -> Store:
    """Return a store in this process's memory. Start it."""
    return Store(MemoryIndex(), MemoryLedger(), MemoryAccount(bucket_life_s))


async def open_store(
    url: str | None,
    *,
    memory: bool = False,
    deployment: str = "default",
    router_id: str | None = None,
    lookup_deadline_s: float = DEADLINE_S,
    shards: int = 1,
) -> Store:
    """Start a store: in Redis at `url`, in an embedded server where there is no URL, or in memory.

    Raises:
        ConfigError: the URL is wrong, or the server must not be used as it is set up. A server that cannot be reached
            is no error: the store works locally until it can.
    """
    if memory:
        store = memory_store()
        await store.start()
        return store
    async with AsyncExitStack() as undo:
        server = None
        if url is None:
            server = EmbeddedServer()
            await server.start()
            undo.push_async_callback(server.close)
        link = open_link(url or server.url if server else url or "")
        await link.start()
        undo.push_async_callback(link.close)
        router_id = router_id or secrets.token_hex(6)
        ledger = SharedLedger(link, deployment=deployment, router_id=router_id)
        index = RedisIndex(
            link,
            deployment=deployment,
            router_id=router_id,
            deadline_s=lookup_deadline_s,
            shards=shards,
            is_alone=lambda: ledger.stats.routers <= 1,
        )
        store = Store(
            index,
            ledger,
            SharedAccount(link, deployment=deployment, router_id=router_id, life_s=bucket_life_s),
            link=link,
            server=server,
        )
        await store.start()
        undo.pop_all()
    return store


def open_link(url: str) -> Link:
    """Return a link, not started, for any kind of Redis URL.

    Raises:
        ConfigError: the URL is wrong.
    """
    target = parse_redis_url(url)
    rng = random.Random(secrets.randbits(64))
    return ClusterLink(target, rng) if target.kind == "cluster" else ServerLink(target, finder(target), rng)
