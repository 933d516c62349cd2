"""One connection to one Redis server, as thin as it can be: calls go out in order, replies come back in order.

Everything that is called in one turn of the event loop leaves in one write. hiredis parses the replies. This file does
not know scripts, keys, deadlines or reconnecting; that is `redis_link`'s.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

Reply = (
    Any  # bytes, int, None, a list of these, or an Exception: an error reply, or ConnectionError when the wire broke
)
Done = Callable[[Reply], None]
Argument = bytes | int | str


def encode(arguments: Sequence[Argument]) -> bytes:
    """Encode the arguments of a command in Redis' wire format, without the array header."""
    parts = []
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Wire(asyncio.Protocol):
    """A connection. `lost` is called once when it ends, after every waiting call was told."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self.broken = False  # an error reply says that this connection, or this server, is of no use any more
        self._lost = lost
        self._reader = hiredis.Reader()
        self._waiting: deque[Done] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def waiting(self) -> int:
        """Calls without a reply yet."""
        return len(self._waiting)

    def call(self, chunks: Sequence[bytes], done: Done) -> None:
        """Send one encoded command, in pieces; `done` gets its reply, perhaps at once if the connection is gone."""
        if self._transport is None:
            done(ConnectionError("not connected"))
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.extend(chunks)
        self._waiting.append(done)

    async def command(self, *arguments: Argument) -> Reply:
        """Send a command and wait for its reply; an error reply is returned, a broken connection raises."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.call(
            (b"*%d\r\n" % len(arguments), encode(arguments)), lambda r: None if future.done() else future.set_result(r)
        )
        reply = await future
        if isinstance(reply, ConnectionError):
            raise reply
        return reply

    def abort(self) -> None:
        """Drop the connection without waiting for anything."""
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        reader, waiting = self._reader, self._waiting
        try:
            reader.feed(data)
            while (reply := reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_FATAL):
                    self.broken = True
                waiting.popleft()(reply)
        except (hiredis.ProtocolError, IndexError):  # not Redis, or a reply that nobody asked for
            self.broken = True
        if self.broken:
            self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        while self._waiting:
            self._waiting.popleft()(ConnectionError(f"connection to Redis lost: {error or 'closed'}"))
        self._lost()

    def _flush(self) -> None:
        if self._transport is not None and self._out:
            self._transport.writelines(self._out)
        self._out = []


_FATAL = (
    "NOSCRIPT",
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "NOAUTH",
)  # connect again: scripts are loaded, the master found
