"""A listener on a real socket, and clients that speak to it byte by byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.proxy.client import ClientPatience, Handle
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.listener import Listener

GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
BODY_BYTES_MAX = 1 << 20


async def echo(exchange: Exchange) -> None:
    """Answer with the request's body, and say in headers what else was seen."""
    body = await exchange.body(BODY_BYTES_MAX)
    request = exchange.request
    seen = repr((request.method, request.target, request.version, request.headers, body)).encode()
    exchange.respond(200, [(b"X-Seen", seen)], body)


class Talk:
    """One client's connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        return await asyncio.wait_for(self.reader.readuntil(b"\r\n\r\n"), 5)

    async def answer(self) -> tuple[int, bytes, bytes]:
        """Return status, head and body of an answer that tells its length."""
        head = await self.head()
        lengths = [line[15:] for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        body = await asyncio.wait_for(self.reader.readexactly(int(lengths[0]) if lengths else 0), 5)
        return int(head.split(b" ")[1]), head, body

    async def rest(self) -> bytes:
        """Return everything up to the end of the connection."""
        return await asyncio.wait_for(self.reader.read(), 5)

    def leave(self) -> None:
        self.writer.transport.abort()


class Served:
    """A listener that runs, and what it told."""

    def __init__(self, listener: Listener, port: int, refused: list[int]) -> None:
        self.listener, self.port, self.refused = listener, port, refused

    @asynccontextmanager
    async def talk(self, data: bytes = b"", *, limit: int = 1 << 16) -> AsyncIterator[Talk]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, limit=limit)
        talk = Talk(reader, writer)
        try:
            talk.say(data)
            yield talk
        finally:
            talk.leave()

    async def closed(self) -> None:
        """Wait until no connection is open; a bound, not a measurement."""
        async with asyncio.timeout(5):
            while self.listener.open_connections:
                await asyncio.sleep(0.01)


@asynccontextmanager
async def listening(handle: Handle = echo, **patience: float) -> AsyncIterator[Served]:
    """Serve `handle` on a free port; fails where a task or a connection is left behind."""
    before, refused = asyncio.all_tasks(), list[int]()
    listener = Listener(handle, ClientPatience(**patience), on_refused=refused.append)
    port = await listener.start("127.0.0.1", 0)
    try:
        yield Served(listener, port, refused)
    finally:
        await listener.close()
    assert listener.open_connections == 0
    assert {task for task in asyncio.all_tasks() if not task.done()} <= before
