"""One request of a client and the answer to it, for the handler to read and write.

An answer is given in one piece with `respond`, or as it comes with `start`, `write` and `end`. Before there is one, a
client that waits for a stream can be sent comments: the head is out with the first of them. Writing never waits by
itself: a writer looks at `is_full` and awaits `drained`, so that a slow client slows its own answer and nothing else.
When the client leaves, the handler is cancelled where it waits; a write after that raises ConnectionResetError.

How bytes arrive and how connections end is in client.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from http import HTTPStatus
from typing import Protocol

from kvroute.errors import BadRequest
from kvroute.proxy.headers import RawHeader
from kvroute.proxy.request import Request

UNREAD_BYTES_MAX = 256 << 10  # of a body that the handler has not asked for; the client is not read beyond it
COMMENT = b": waiting\n\n"
JOIN_BYTES_MAX = 256 << 10  # a larger body is not copied for the sake of one write


class Line(Protocol):
    """The connection, as an exchange sees it."""

    is_full: bool  # what was written waits to be taken
    is_gone: bool
    is_closing: bool  # no further request will be taken

    def send(self, data: bytes) -> None: ...
    def cut(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...
    def wake(self) -> None: ...
    async def body_came(self) -> None: ...
    async def room(self, patience_s: float) -> None: ...


class Exchange:
    """A request, its body, and its answer."""

    __slots__ = (
        "_answers_body",
        "_body",
        "_head",
        "_is_chunked",
        "_left",
        "_limit",
        "_line",
        "error",
        "has_body",
        "is_ahead",
        "is_over",
        "keep_alive",
        "request",
        "status",
    )

    def __init__(self, line: Line, request: Request, *, keep_alive: bool, error: BadRequest | None = None) -> None:
        self.request = request
        self.status = 0  # of the answer; 0 until it began
        self.keep_alive = keep_alive  # to set to False before the answer begins, or to hang up after it
        self.has_body = False  # all of the request has arrived
        self.is_over = False  # the answer is complete
        self.is_ahead = False  # the answer has begun with comments, before anybody had one
        self.error = error  # why the request cannot be read to its end
        self._line = line
        self._limit: int | None = None  # of the body, once somebody reads it
        self._body: bytes | bytearray = b""
        self._head = b""  # of the answer, sent together with its first bytes
        self._is_chunked = False
        self._answers_body = True
        self._left: int | None = None  # of an answer whose length was told

    async def body(self, limit_bytes: int) -> bytes:
        """Return the whole body.

        Raises:
            BadRequest: it is larger than the limit, broken, or does not come.
        """
        self._limit = limit_bytes
        if (self.request.length or 0) > limit_bytes:
            raise _too_large(limit_bytes)
        if self.request.expects_continue:
            self._line.send(b"HTTP/1.1 100 Continue\r\n\r\n")
        if not self.has_body:
            await self._arrived(limit_bytes)
        if len(self._body) > limit_bytes:
            raise _too_large(limit_bytes)
        if self.error is not None:
            raise self.error
        body, self._body = self._body, b""
        return body if isinstance(body, bytes) else bytes(body)

    async def _arrived(self, limit_bytes: int) -> None:
        self._line.resume()
        while not self.has_body and self.error is None and len(self._body) <= limit_bytes:
            await self._line.body_came()

    def respond(self, status: int, fields: Iterable[RawHeader], body: bytes) -> None:
        """Answer in one piece, with one write. Length and framing are told here and do not belong in `fields`."""
        self._begin(status, fields, len(body))
        self.is_over = True
        if not self._answers_body:
            self._line.send(self._head)
        elif len(body) < JOIN_BYTES_MAX:
            self._line.send(self._head + body)
        else:
            self._line.send(self._head)
            self._line.send(body)

    def start(self, status: int, fields: Iterable[RawHeader], length: int | None = None) -> None:
        """Begin an answer that is written as it comes. Its head goes out with its first bytes."""
        self._begin(status, fields, length)
        self._left = length

    def comment(self, fields: Iterable[RawHeader]) -> None:
        """Show a client that waits for a stream of events that it is not forgotten."""
        if not self.status:
            self.start(200, fields)
            self.is_ahead = True
        if self.is_ahead and not self._line.is_full:
            self.write(COMMENT)

    def write(self, data: bytes) -> None:
        """Send some of the answer.

        Raises:
            ConnectionResetError: the client left.
        """
        if not self._answers_body or not data:
            return
        if self._is_chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        elif self._left is not None:
            self._left -= len(data)
        self._send(data)

    def end(self, data: bytes = b"") -> None:
        """Send the last bytes and complete the answer."""
        if self._is_chunked:
            self._send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n")
        else:
            self.write(data)
            if self._head:
                self._send(b"")
        self.is_over = True
        if self._left and self._answers_body:  # fewer or more bytes than its head has told
            self.cut()

    @property
    def is_full(self) -> bool:
        """Whether the client has so much to take that writing more should wait."""
        return self._line.is_full

    async def drained(self, patience_s: float) -> None:
        """Wait until the client has taken most of what was written.

        Raises:
            ConnectionResetError: it took too little for so long that it counts as having left.
        """
        await self._line.room(patience_s)

    def cut(self) -> None:
        """Break the connection off, so that what was sent cannot be taken for a whole answer."""
        self.keep_alive = False
        self._line.cut()

    # What the connection tells:

    def feed(self, data: bytes) -> None:
        if not self._body:
            self._body = data
        else:
            if isinstance(self._body, bytes):
                self._body = bytearray(self._body)
            self._body += data
        size = len(self._body)
        if self._limit is None:
            if size > UNREAD_BYTES_MAX:
                self._line.pause()
        elif size > self._limit:
            self._line.pause()
            self._line.wake()

    def fail(self, error: BadRequest) -> None:
        self.error = error
        self._line.wake()

    def _begin(self, status: int, fields: Iterable[RawHeader], length: int | None) -> None:
        assert not self.status, "an answer had begun"
        self.status = status
        request = self.request
        parts = [_status_line(request.version, status)]
        for name, value in fields:
            parts += (name, b": ", value, b"\r\n")
        if status == 204 or status == 304:
            self._answers_body = False
        else:
            self._answers_body = request.method != "HEAD"
            if length is not None:
                parts.append(b"Content-Length: %d\r\n" % length)
            elif request.version == "1.0":
                self.keep_alive = False
            else:
                parts.append(b"Transfer-Encoding: chunked\r\n")
                self._is_chunked = self._answers_body
        if not self.has_body or self._line.is_closing:  # the rest of the body is not waited for
            self.keep_alive = False
        parts.append(b"\r\n" if self.keep_alive else b"Connection: close\r\n\r\n")
        self._head = b"".join(parts)

    def _send(self, data: bytes) -> None:
        if self._line.is_gone:
            raise ConnectionResetError("the client left")
        if self._head:
            data, self._head = self._head + data, b""
        self._line.send(data)


@lru_cache(maxsize=256)
def _status_line(version: str, status: int) -> bytes:
    try:
        phrase = HTTPStatus(status).phrase
    except ValueError:
        phrase = ""
    return f"HTTP/{version} {status} {phrase}\r\n".encode()


def _too_large(limit_bytes: int) -> BadRequest:
    message = f"The body is larger than {limit_bytes} bytes, which is this router's limit (proxy.body_bytes_max)"
    return BadRequest(message, status=413, kind="RequestEntityTooLargeError")
