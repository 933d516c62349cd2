"""A store of a benchmark's own, and the shared index on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.adapters.embedded import EmbeddedServer
from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.redis_link import open_wire
from kvroute.adapters.redis_url import parse_redis_url
from kvroute.adapters.redis_wire import Wire
from kvroute.adapters.store import open_link


@asynccontextmanager
async def served() -> AsyncIterator[tuple[RedisIndex, Wire]]:
    """A server, an index on it, and a bare connection beside."""
    server = EmbeddedServer()
    await server.start()
    link = open_link(server.url)
    await link.start()
    index = RedisIndex(link, deployment="bench", router_id="bench", deadline_s=2.0)
    await index.start()
    target, lost = parse_redis_url(server.url), asyncio.Event()
    wire = await open_wire(target, target.nodes[0], lost.set)
    try:
        yield index, wire
    finally:
        wire.abort()
        await lost.wait()
        await index.close()
        await link.close()
        await server.close()
