"""Every index, opened the same way: in memory, in Redis with and without other routers, in a Redis cluster."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import pytest

from kvroute.adapters.index import Index, MemoryIndex
from tests.redis_servers import cluster, fresh_name, router, server

Opener = Callable[[], "asynccontextmanager[Index]"]


@asynccontextmanager
async def memory_index() -> AsyncIterator[Index]:
    yield MemoryIndex()


def redis_opener(url: str, shards: int, *, is_alone: bool = False) -> Opener:
    return lambda: router(url, fresh_name(), "a", shards=shards, is_alone=lambda: is_alone)


@pytest.fixture(scope="module", params=["memory", "redis", "redis alone", "cluster"])
def opener(request) -> Iterator[Opener]:
    if request.param == "memory":
        yield memory_index
    elif request.param.startswith("redis"):
        with server() as one:
            yield redis_opener(one.url, 1, is_alone=request.param == "redis alone")
    else:
        with cluster() as url:
            yield redis_opener(url, 3)


@pytest.fixture
async def index(opener) -> AsyncIterator[Index]:
    async with opener() as one:
        yield one
