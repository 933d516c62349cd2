"""One HTTP/1.1 connection to a replica, and the answer that arrives on it.

A connection carries one exchange at a time. httptools parses, strictly; this file keeps what it found, in order, and
never more than `HIGH_WATER_BYTES` that nobody has read: beyond that the socket is not read, so that a slow client slows
the engine's stream down instead of filling this process's memory. It does not know how connections are made or reused,
nor when an exchange may be repeated: see upstream.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser
from msgspec import Struct

from kvroute.errors import ReplicaBroke, ReplicaFailed, ReplicaTimedOut, ReplicaUnreachable

HIGH_WATER_BYTES = 256 * 1024  # of an answer's body, unread
HEAD_LIMIT_BYTES = 64 * 1024  # status line and headers together
_H = ord("H")
_FRAMING = frozenset((b"content-length", b"transfer-encoding"))
RawHeaders = list[tuple[bytes, bytes]]


class Patience(Struct, frozen=True):
    """How long a silent replica is waited for."""

    first_byte_s: float  # of the answer's body
    idle_s: float  # between two chunks


class Answer:
    """Status, headers and body of one answer. `read` gives what has come so far, and b"" at the end."""

    __slots__ = (
        "_connection",
        "_error",
        "_parts",
        "_patience",
        "_replica",
        "_size",
        "_spoke",
        "_until_s",
        "_waiter",
        "complete",
        "headers",
        "heard",
        "status",
    )

    def __init__(self, connection: Connection, replica: str, patience: Patience) -> None:
        self.status = 0  # 0 until the head has arrived
        self.headers: RawHeaders = []
        self.heard = False  # any byte of the answer has arrived
        self.complete = False
        self._connection = connection
        self._replica = replica
        self._patience = patience
        self._error: ReplicaFailed | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._spoke = False  # any byte of the body has arrived; servers send the head of a stream before its prefill
        self._until_s = connection.loop.time() + patience.first_byte_s

    async def head(self) -> None:
        """Wait for status and headers.

        Raises:
            ReplicaUnreachable: the connection ended before any byte.
            ReplicaBroke: it ended within the head, or what came is not HTTP.
            ReplicaTimedOut: the time for the first byte has passed.
        """
        while not self.status:
            if self._error is not None:
                raise self._error
            await self._waiting()

    async def read(self) -> bytes:
        """Return the next bytes of the body as soon as there are any; b"" once the body is complete.

        Raises:
            ReplicaBroke: the connection ended before the body did. What had arrived was returned before.
            ReplicaTimedOut: nothing came for the idle time. The time that the caller spends elsewhere does not count.
        """
        parts = self._parts
        while not parts:
            if self._error is not None:
                raise self._error
            if self.complete:
                return b""
            if self._spoke:
                self._until_s = self._connection.loop.time() + self._patience.idle_s
            await self._waiting()
        return self.take()

    def take(self) -> bytes:
        """Return what has come of the body and was not read yet; b"" says nothing about what is still to come."""
        parts = self._parts
        data = parts[0] if len(parts) == 1 else b"".join(parts)
        parts.clear()
        if self._size >= HIGH_WATER_BYTES and not self.complete:  # complete: the connection may serve another by now
            self._connection.resume()
        self._size = 0
        return data

    def close(self) -> None:
        """Stop here: an answer that is not complete takes its connection down, which makes the engine abort."""
        if not self.complete and self._error is None:
            self.lose("closed by the router")
            self._connection.abort()

    def _waiting(self) -> asyncio.Future[None]:
        self._waiter = self._connection.loop.create_future()
        return self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    # What the connection tells:

    def check(self, now_s: float) -> None:
        """Give up where the replica has been waited for too long. Time that the reader spends elsewhere is not."""
        if self._waiter is not None and now_s >= self._until_s:
            what = f"silent for {self._patience.idle_s:g} s" if self._spoke else "no answer in time"
            self._fail(ReplicaTimedOut(f"{self._replica}: {what}", replica=self._replica))
            self._connection.abort()

    def begin(self, status: int, headers: RawHeaders) -> None:
        self.status, self.headers = status, headers
        self._wake()

    def feed(self, body: bytes) -> None:
        self._spoke = True
        self._parts.append(body)
        before, self._size = self._size, self._size + len(body)
        if before < HIGH_WATER_BYTES <= self._size:
            self._connection.pause()
        self._wake()

    def end(self) -> None:
        self.complete = True
        self._wake()

    def lose(self, why: str) -> None:
        kind = ReplicaBroke if self.heard else ReplicaUnreachable
        self._fail(kind(f"{self._replica}: {why}", replica=self._replica))

    def _fail(self, error: ReplicaFailed) -> None:
        if self._error is None and not self.complete:
            self._error = error
            self._wake()


class Connection(asyncio.Protocol):
    """A socket, its parser, and the exchange that is under way on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_free: Callable[[Connection], None]) -> None:
        self.loop = loop
        self.free_since_s = 0.0
        self.closed: asyncio.Future[None] = loop.create_future()
        self._on_free = on_free
        self._parser = HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._headers: RawHeaders = []
        self._head_bytes = 0
        self._until_eof = False
        self._is_last = False
        self._paused = False

    @property
    def is_usable(self) -> bool:
        """Say whether another exchange may begin: open, idle, and nothing of the last request left to send."""
        transport = self._transport
        return (
            transport is not None
            and self._answer is None
            and not transport.is_closing()
            and not transport.get_write_buffer_size()
        )

    def exchange(self, head: bytes, body: bytes, *, replica: str, patience: Patience) -> Answer:
        """Send a request and return its answer, of which nothing has arrived yet."""
        assert self._transport is not None
        assert self._answer is None
        self._head_bytes = 0
        self._answer = Answer(self, replica, patience)
        self._transport.write(head + body if len(body) < HIGH_WATER_BYTES else head)
        if len(body) >= HIGH_WATER_BYTES:
            self._transport.write(body)
        return self._answer

    def check(self, now_s: float) -> None:
        """Look at the clock for the exchange that is under way, if there is one."""
        if self._answer is not None:
            self._answer.check(now_s)

    def pause(self) -> None:
        if self._transport is not None and not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._transport is not None and self._paused and not self._transport.is_closing():
            self._paused = False
            self._transport.resume_reading()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses

    def data_received(self, data: bytes) -> None:
        answer = self._answer
        if answer is None:  # a replica that speaks unasked is not one to reuse
            self.abort()
            return
        if not answer.heard:
            answer.heard = True
            if data[0] != _H:  # the parser would pass over empty lines
                self._break(answer, "its answer is not HTTP")
                return
        if not answer.status or self._headers:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (HttpParserError, HttpParserUpgrade) as error:
            self._break(answer, f"its answer is not HTTP: {error}")
        if self._head_bytes > HEAD_LIMIT_BYTES and (self._headers or not answer.status):
            self._break(answer, f"its headers are larger than {HEAD_LIMIT_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        answer, self._answer = self._answer, None
        if answer is not None:
            if self._until_eof and answer.status and exc is None:
                answer.end()
            else:
                answer.lose(str(exc) if exc else "it closed the connection")
        if not self.closed.done():
            self.closed.set_result(None)
        self._on_free(self)

    def _break(self, answer: Answer, why: str) -> None:
        answer.lose(why)
        self.abort()

    # httptools' side

    def on_message_begin(self) -> None:
        if self._answer is None:  # a second answer behind the first must not meet the next request
            self.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        headers, self._headers = self._headers, []
        status = self._parser.get_status_code()
        if self._answer is None:
            return
        names = {name.lower() for name, _ in headers}
        is_coded, has_length = b"transfer-encoding" in names, b"content-length" in names
        if status < 200:  # 100 Continue and 103 Early Hints come before the answer
            if is_coded or has_length:
                raise ValueError("an interim answer that claims a body")
            return
        if is_coded and _codings(headers) != [b"chunked"]:
            raise ValueError("a Transfer-Encoding other than chunked, or more than one")
        self._until_eof = not is_coded and not has_length
        self._is_last = b"connection" in names and self._parser.get_http_version() != "1.1"  # whatever else it says
        self._answer.begin(status, headers)

    def on_body(self, body: bytes) -> None:
        if self._answer is not None:
            self._answer.feed(body)

    def on_message_complete(self) -> None:
        answer = self._answer
        if answer is None or not answer.status:
            return
        trailers, self._headers = self._headers, []
        if trailers and not _FRAMING.isdisjoint(name.lower() for name, _ in trailers):
            raise ValueError("a trailer that claims a body")
        self._answer = None
        answer.end()
        self.resume()
        if self._is_last or self._until_eof or not self._parser.should_keep_alive():
            self.abort()
        else:
            self._on_free(self)


def _codings(headers: RawHeaders) -> list[bytes]:
    return [value.lower() for name, value in headers if name.lower() == b"transfer-encoding"]
