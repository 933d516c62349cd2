"""Loops to run on: what meets sockets directly is tested on asyncio's own loop and on uvloop, the service's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import uvloop

ON_BOTH = {"test_client.py", "test_dispatch.py", "test_exchange.py", "test_listener.py", "test_relay.py"}


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Name the loops of a test."""
    loops: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in ON_BOTH:
        loops["uvloop"] = uvloop.new_event_loop
    return loops
