"""One connection to one Redis server, as thin as it can be: calls go out in order, replies come back in order.

Everything that is called in one turn of the event loop leaves in one write. hiredis parses the replies. This file does
not know scripts, keys, deadlines or reconnecting; that is `redis_link`'s.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

import hiredis

log = logging.getLogger(__name__)

Reply = Any  # bytes, int, None, a list of these; an Exception for an error reply, ConnectionError for a broken wire
Done = Callable[[Reply], None]
Argument = bytes | int | str

CALLS_IN_FLIGHT_MAX = 4096
BYTES_IN_FLIGHT_MAX = 16 << 20
BIG_ARGUMENT_BYTES = 8_192  # from here on, copying costs more than a piece of its own


def encode(*arguments: Argument) -> list[bytes]:
    """Encode a command in Redis' wire format. Big arguments are pieces of their own, which are not copied."""
    for argument in arguments:
        if type(argument) is bytes and len(argument) >= BIG_ARGUMENT_BYTES:
            return _in_pieces(arguments)
    return [cast(bytes, hiredis.pack_command(cast(Any, arguments)))]  # its stub wants a tuple of one


def _in_pieces(arguments: Sequence[Argument]) -> list[bytes]:
    pieces: list[bytes] = []
    small = b"*%d\r\n" % len(arguments)
    for argument in arguments:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        small += b"$%d\r\n" % len(data)
        if len(data) >= BIG_ARGUMENT_BYTES:
            pieces += (small, data)
            small = b"\r\n"
        else:
            small += data + b"\r\n"
    return [*pieces, small]


# Connecting again loads the scripts, and finds the master.
_FATAL = ("NOSCRIPT", "READONLY", "LOADING", "MASTERDOWN", "NOAUTH")


class Wire(asyncio.Protocol):
    """A connection. `lost` is called once when it ends, after every waiting call was told."""

    def __init__(self, lost: Callable[[], None]) -> None:
        self._lost = lost
        self._reader = hiredis.Reader()
        self.bytes_in_flight = 0
        self.replies = 0
        self._waiting: deque[tuple[Done, int]] = deque()
        self._out: list[bytes] = []
        self._transport: asyncio.WriteTransport | None = None
        self._loop = asyncio.get_running_loop()

    @property
    def is_full(self) -> bool:
        """Whether so much is under way that nothing more should be sent now."""
        return len(self._waiting) >= CALLS_IN_FLIGHT_MAX or self.bytes_in_flight >= BYTES_IN_FLIGHT_MAX

    def call(self, command: Sequence[bytes], done: Done) -> None:
        """Send one encoded command; `done` gets its reply, perhaps at once if the connection is gone."""
        if self._transport is None:
            done(ConnectionError("not connected"))
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        size = sum(map(len, command))
        self.bytes_in_flight += size
        self._out.extend(command)
        self._waiting.append((done, size))

    async def command(self, *arguments: Argument) -> Reply:
        """Send a command and wait for its reply; an error reply is returned, a broken connection raises."""
        future: asyncio.Future[Reply] = self._loop.create_future()
        self.call(encode(*arguments), lambda r: None if future.done() else future.set_result(r))
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
        reader.feed(data)
        try:
            while (reply := reader.gets()) is not False:
                if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(_FATAL):
                    self._give_up(str(reply))
                if not waiting:
                    self._give_up("a reply that nobody asked for")
                    return
                done, size = waiting.popleft()
                self.bytes_in_flight -= size
                self.replies += 1
                done(reply)
        except hiredis.ProtocolError as error:
            self._give_up(str(error))

    def _give_up(self, why: str) -> None:
        log.warning("dropping a connection to Redis: %s", why)
        self.abort()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self._out.clear()
        while self._waiting:
            self._waiting.popleft()[0](ConnectionError(f"connection to Redis lost: {error or 'closed'}"))
        self._lost()

    def _flush(self) -> None:
        if self._transport is not None and self._out:
            self._transport.writelines(self._out)
        self._out = []
