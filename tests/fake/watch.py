"""Waiting for a replica to come to a state, which only asking tells."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

T = TypeVar("T")


async def until(read: Callable[[], Awaitable[T]], holds: Callable[[T], bool], timeout_s: float = 20.0) -> T:
    """Read again and again until the value will do, and return it."""
    async with asyncio.timeout(timeout_s):
        while not holds(value := await read()):
            await asyncio.sleep(0.01)
    return value
