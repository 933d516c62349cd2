"""`kvroute doctor`'s look at the Redis that routers share: can it be used, as it is set up, and how far away is it?"""

from __future__ import annotations

import asyncio
import os
import ssl
import statistics
import time

import hiredis

from kvroute.adapters.redis_link import login, open_wire
from kvroute.adapters.redis_sentinel import finder
from kvroute.adapters.redis_url import Target, parse_redis_url
from kvroute.adapters.redis_wire import Wire
from kvroute.errors import ConfigError
from kvroute.routing.findings import StoreFacts

TIMEOUT_S = 5.0  # for everything
PINGS = 50


async def examine_store(url: str, deadline_s: float) -> StoreFacts:
    """Return what can be seen of a server. Of a cluster, the node that was named first speaks for the others.

    Raises:
        ConfigError: the URL is wrong.
    """
    target = parse_redis_url(url)
    try:
        async with asyncio.timeout(TIMEOUT_S):
            wire = await open_wire(target, await finder(target)(), lambda: None)
            try:
                return await _look(wire, target, deadline_s)
            finally:
                wire.abort()
    except TimeoutError:
        trouble = f"no answer in {TIMEOUT_S:g} s"
    except OSError as error:
        trouble = os.strerror(error.errno) if error.errno and not isinstance(error, ssl.SSLError) else str(error)
    except ConfigError as error:
        trouble = error.message.removeprefix(f"store.url: {target.describe} ")
    return StoreFacts(url=target.describe, trouble=trouble)


async def _look(wire: Wire, target: Target, deadline_s: float) -> StoreFacts:
    await login(wire, target)
    info = await wire.command("INFO")
    if isinstance(info, hiredis.ReplyError):
        raise ConfigError(f"INFO is refused: {info}")
    fields = dict(line.split(":", 1) for line in bytes(info).decode("utf-8", "replace").splitlines() if ":" in line)
    times = []
    for _ in range(PINGS):
        start_s = time.monotonic()
        await wire.command("PING")
        times.append(time.monotonic() - start_s)
    role = fields.get("role", "master")
    return StoreFacts(
        url=target.describe,
        trouble="" if role == "master" else "it is a replica; name its master, or Sentinel",
        version=fields.get("redis_version", ""),
        policy=fields.get("maxmemory_policy", ""),
        maxmemory_bytes=_number(fields, "maxmemory"),
        used_bytes=_number(fields, "used_memory"),
        ping_s=statistics.median(times),
        slowest_ping_s=max(times),
        deadline_s=deadline_s,
    )


def _number(fields: dict[str, str], name: str) -> int:
    text = fields.get(name, "")
    return int(text) if text.isdecimal() else 0
