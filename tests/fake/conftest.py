"""Simulated replicas that serve on a free port for the length of a test."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
import pytest

from kvroute.fake.server import build_replica, serve_replica

Serve = Callable[..., Awaitable[aiohttp.ClientSession]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """Serve a replica with some settings, and return a session whose base is its URL."""
    async with AsyncExitStack() as stack:

        async def start(**settings: Any) -> aiohttp.ClientSession:
            app = build_replica(**{"speed": 20.0, "kv_tokens": 32_768, **settings})
            runner, url = await serve_replica(app)
            stack.push_async_callback(runner.cleanup)
            return await stack.enter_async_context(aiohttp.ClientSession(url))

        yield start
