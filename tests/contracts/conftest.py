"""Every index, opened the same way: in memory, in Redis, in a Redis cluster."""

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


def redis_opener(url: str, shards: int) -> Opener:
    return lambda: router(url, fresh_name(), "a", shards=shards)


@pytest.fixture(scope="module", params=["memory", "redis", "cluster"])
def opener(request) -> Iterator[Opener]:
    if request.param == "memory":
        yield memory_index
    elif request.param == "redis":
        with server() as one:
            yield redis_opener(one.url, 1)
    else:
        with cluster() as url:
            yield redis_opener(url, 3)


@pytest.fixture
async def index(opener) -> AsyncIterator[Index]:
    async with opener() as one:
        yield one
