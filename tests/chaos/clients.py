"""Clients that stream chats and keep exactly what they saw of each answer."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from typing import Any

import aiohttp


@dataclass
class Seen:
    """One request, as its client saw it."""

    status: int | None = None
    replica: str = ""
    events: int = 0
    is_done: bool = False  # ended with [DONE] and no error
    error: str | None = None  # what told the client that it failed
    began: asyncio.Event = field(default_factory=asyncio.Event)  # the first event has come


def chat(prompt: str, max_tokens: int, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens, "stream": True, **fields}


async def stream(session: aiohttp.ClientSession, body: dict[str, Any], seen: Seen) -> Seen:
    """Send one request and read all of its answer; what goes wrong is kept, not raised."""
    try:
        async with session.post("/v1/chat/completions", json=body) as response:
            seen.status = response.status
            seen.replica = response.headers.get("x-kvroute-replica", "")
            if response.status != 200:
                seen.error = await response.text()
                return seen
            await _listen(response, seen)
    except aiohttp.ClientError as error:
        seen.error = f"{type(error).__name__}: {error}"
    return seen


async def until_begun(everyone: list[Seen], replica: str, count: int, timeout_s: float) -> None:
    """Wait until a replica has begun to answer so many of the requests."""
    async with asyncio.timeout(timeout_s):
        while sum(seen.began.is_set() and seen.replica == replica for seen in everyone) < count:
            await asyncio.sleep(0.01)


async def _listen(response: aiohttp.ClientResponse, seen: Seen) -> None:
    async for line in response.content:
        if line.startswith(b"data: [DONE]"):
            seen.is_done = seen.error is None
        elif line.startswith(b"data: "):
            seen.events += 1
            seen.began.set()
            if failure := json.loads(line[6:]).get("error"):
                seen.error = str(failure)
    if not seen.is_done and seen.error is None:
        seen.error = "ended without [DONE]"


def open_connections(port: int) -> int:
    """Count connections of this machine's IPv4 sockets that are established, or half closed, at a local port."""
    live = {"01", "04", "05", "08"}  # ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, as the kernel writes them
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] in live for row in rows)
