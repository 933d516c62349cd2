"""A client's connection: its requests one after the other, each answered by one call of the handler.

httptools parses as bytes arrive; requests that come before their turn wait in order, a few of them, then the socket is
not read any more. One task serves the connection for as long as it lasts. When the connection is lost that task is
cancelled at once, wherever the handler is: who waits for an answer that nobody will read would only occupy an engine.

A connection waits for one thing at a time: a request, a body, or room to write. `until_s` says how long; the listener
looks at it now and then, which is cheaper than a timer for every wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from enum import Enum
from math import inf
from typing import Any, cast

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from msgspec import Struct

from kvroute.errors import BadRequest
from kvroute.proxy import headers
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.headers import RawHeader
from kvroute.proxy.openai import error_body
from kvroute.proxy.request import Request, request_of

log = logging.getLogger("kvroute.listener")

TARGET_BYTES_MAX = 8 << 10
HEAD_BYTES_MAX = 64 << 10  # target and headers together; trailers alike
WAITING = 8  # requests behind the one that is handled, from which the socket is not read
WAITING_MAX = 64  # as many may have been in the bytes that were read before
_FRAMING = (b"content-length", b"transfer-encoding")
LINGER_S = 5.0  # for a client to take an answer that came before the end of its request

Handle = Callable[[Exchange], Awaitable[None]]


class ClientPatience(Struct, frozen=True, kw_only=True):
    """How long a silent client is waited for."""

    keep_alive_s: float = 75.0  # between two requests
    head_s: float = 30.0  # from the first byte of a head to its last
    body_idle_s: float = 60.0  # between two pieces of a body
    flush_s: float = 60.0  # for the last answer to be taken


class _Wait(Enum):
    NOTHING = 0
    REQUEST = 1
    BODY = 2
    ROOM = 3
    END = 4


class Client(asyncio.Protocol):
    """A socket, its parser, and the exchanges on it."""

    def __init__(
        self,
        handle: Handle,
        patience: ClientPatience,
        *,
        on_open: Callable[[Client], None],
        on_close: Callable[[Client], None],
        on_refused: Callable[[int], None],
    ) -> None:
        self.is_full = False
        self.is_gone = False
        self.is_closing = False
        self.until_s = inf
        self.task: asyncio.Task[None] | None = None
        self._handle = handle
        self._patience = patience
        self._on_open = on_open
        self._on_close = on_close
        self._on_refused = on_refused
        self._parser: Any = HttpRequestParser(self)
        self._exchanges: deque[Exchange] = deque()  # in order; the first one is handled, or next
        self._incoming: Exchange | None = None  # whose body is still arriving
        self._wait = _Wait.NOTHING
        self._waiter: asyncio.Future[None] | None = None
        self._is_deaf = False  # whatever comes is not read any more, only taken off the socket
        self._is_paused = False
        self._refusal: BadRequest | None = None  # found in a callback of the parser
        self._target = b""
        self._headers: list[RawHeader] = []
        self._head_bytes = 0
        self._head_until_s = inf  # finite while a head is arriving

    # The exchange's side

    def send(self, data: bytes) -> None:
        self._transport.write(data)

    def cut(self) -> None:
        self.is_gone = True
        self._transport.abort()

    def pause(self) -> None:
        if not self._is_paused and not self._transport.is_closing():
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self._transport.is_closing():
            self._is_paused = False
            self._transport.resume_reading()
            if self._head_until_s < inf:  # the time in which nobody read does not count
                self._head_until_s = self._loop.time() + self._patience.head_s

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def body_came(self) -> None:
        """Wait until the body is complete, too large, broken or late."""
        await self._wait_for(_Wait.BODY, self._loop.time() + self._patience.body_idle_s)

    async def room(self, patience_s: float) -> None:
        """Wait until there is room to write."""
        until_s = self._loop.time() + patience_s
        while self.is_full:
            if self.is_gone:
                raise ConnectionResetError("the client takes nothing")
            await self._wait_for(_Wait.ROOM, until_s)

    # The listener's side

    def hang_up(self) -> None:
        """Take no further request; close at once where none is under way."""
        self.is_closing = True
        if self._wait is _Wait.REQUEST and self._head_until_s == inf:
            self.wake()

    def end(self) -> None:
        """Break off, whatever is under way."""
        self.cut()
        if self.task is not None:
            self.task.cancel()

    def check(self, now_s: float) -> None:
        """Give up a wait that has lasted too long."""
        if now_s < self.until_s:
            return
        self.until_s = inf
        if self._wait is _Wait.BODY:
            self._exchanges[0].fail(BadRequest("The body did not come in time", status=408, kind="RequestTimeoutError"))
        elif self._wait is not _Wait.REQUEST:
            self.cut()
            self.wake()
        elif self._head_until_s < inf:
            self._broke(BadRequest("The request did not come in time", status=408, kind="RequestTimeoutError"))
        else:
            self.hang_up()

    async def _wait_for(self, what: _Wait, until_s: float) -> None:
        self._wait, self.until_s = what, until_s
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None
            self._wait, self.until_s = _Wait.NOTHING, inf

    # One task for each connection

    async def _serve(self) -> None:
        patience_s = self._patience.head_s  # for the first request
        exchanges = self._exchanges
        while True:
            while not exchanges:
                if self.is_closing:
                    self._close()
                    return
                await self._wait_for(_Wait.REQUEST, min(self._head_until_s, self._loop.time() + patience_s))
            exchange = exchanges[0]
            await self._answer(exchange)
            exchanges.popleft()
            if not exchange.keep_alive or not exchange.is_over:
                self._finish(exchange)
                return
            if len(exchanges) < WAITING:
                self.resume()
            patience_s = self._patience.keep_alive_s

    async def _answer(self, exchange: Exchange) -> None:
        if exchange.error is not None and not exchange.request.method:
            self._on_refused(exchange.error.status)
            exchange.respond(exchange.error.status, headers.ours(), error_body(exchange.error))
            return
        try:
            await self._handle(exchange)
        except ConnectionError:  # the client left, or was cut off
            self.cut()
        except Exception:
            log.exception("%s %s", exchange.request.method, exchange.request.path)
            self.cut()

    def _finish(self, exchange: Exchange) -> None:
        """Close behind the last answer, in such a way that the client gets all of it."""
        if not exchange.is_over:
            self.cut()
        elif exchange.has_body and not self._exchanges:
            self._close()
        elif not self.is_gone:  # closing with unread bytes resets the connection, and the answer with it
            self._is_deaf = True
            self._exchanges.clear()
            self._wait, self.until_s = _Wait.END, self._loop.time() + LINGER_S
            self.resume()
            if self._transport.can_write_eof():
                self._transport.write_eof()

    def _close(self) -> None:
        self._wait, self.until_s = _Wait.END, self._loop.time() + self._patience.flush_s
        self._transport.close()

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's are not subclasses
        self._loop = asyncio.get_running_loop()
        self.task = self._loop.create_task(self._serve())
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        if self._incoming is None:
            self._head_bytes += len(data)
        elif self._wait is _Wait.BODY:
            self.until_s = self._loop.time() + self._patience.body_idle_s
        try:
            self._feed(data)
        except HttpParserError as error:
            self._broke(self._refusal or _not_http(error))
        if self._head_bytes > HEAD_BYTES_MAX and self._incoming is None:
            self._broke(_head_too_large())
        if self._head_until_s == 0.0:
            self._head_until_s = self._loop.time() + self._patience.head_s
            if self._wait is _Wait.REQUEST:
                self.until_s = self._head_until_s

    def eof_received(self) -> None:
        if self._exchanges:  # somebody who says nothing more and waits cannot be told from somebody who left
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.is_gone and self.task is not None:
            self.task.cancel()
        self.is_gone = True
        self.wake()
        self._on_close(self)

    def pause_writing(self) -> None:
        self.is_full = True

    def resume_writing(self) -> None:
        self.is_full = False
        if self._wait is _Wait.ROOM:
            self.wake()

    def _feed(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except HttpParserUpgrade as upgrade:
            if not self._is_deaf:
                self._decline_upgrade(data[upgrade.args[0] :])

    def _decline_upgrade(self, rest: bytes) -> None:
        """Read on in HTTP/1.1, as a server may (RFC 9110, 7.8): Java's client offers h2c with its first request.

        The parser stops behind such a head. Another one, told the framing, reads the body, and no request after it.
        """
        exchange = self._incoming = self._exchanges[-1]
        exchange.has_body = exchange.keep_alive = False
        framing = [
            b"%b: %b\r\n" % (name, exchange.request.fields[name])
            for name in (b"content-length", b"transfer-encoding")
            if name in exchange.request.fields
        ]
        self._parser = HttpRequestParser(_BodyOnly(self))
        self._feed(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(framing), rest))

    def _broke(self, error: BadRequest) -> None:
        """Read no further; say why, in its turn."""
        self._is_deaf = True
        if self._incoming is not None:
            self._incoming.fail(error)
        elif not self._exchanges or self._exchanges[-1].keep_alive:
            self._exchanges.append(Exchange(self, Request(), keep_alive=False, error=error))
            if self._wait is _Wait.REQUEST:
                self.wake()

    # httptools' side

    def on_message_begin(self) -> None:
        if len(self._exchanges) >= WAITING_MAX:
            self._refusal = BadRequest("Too many requests were sent without waiting for answers")
            raise self._refusal
        self._target, self._headers, self._head_until_s = b"", [], 0.0

    def on_url(self, part: bytes) -> None:
        self._target += part
        if len(self._target) > TARGET_BYTES_MAX:
            message = f"The request's target is longer than {TARGET_BYTES_MAX} bytes"
            self._refusal = BadRequest(message, status=414, kind="URITooLongError")
            raise self._refusal

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._incoming is None:
            self._headers.append((name, value.rstrip(b" \t")))
            return
        self._head_bytes += len(name) + len(value)  # trailers, which nobody reads
        if name.lower() in _FRAMING:
            self._refusal = BadRequest("The request's trailers say again where it ends")
            raise self._refusal
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refusal = _head_too_large()
            raise self._refusal

    def on_headers_complete(self) -> None:
        parser = self._parser
        try:
            request = request_of(parser.get_method().decode(), self._target, parser.get_http_version(), self._headers)
            if self._head_bytes > HEAD_BYTES_MAX and _size(request) > HEAD_BYTES_MAX:
                raise _head_too_large()
        except BadRequest as error:
            self._refusal = error
            raise
        self._head_until_s, self._head_bytes = inf, 0
        exchange = Exchange(self, request, keep_alive=request.version == "1.1" and parser.should_keep_alive())
        self._incoming = exchange
        self._exchanges.append(exchange)
        if self._wait is _Wait.REQUEST:
            self.wake()
        elif len(self._exchanges) > WAITING:
            self.pause()

    def on_body(self, data: bytes) -> None:
        if self._incoming is not None:
            self._incoming.feed(data)

    def on_message_complete(self) -> None:
        exchange, self._incoming = self._incoming, None
        self._head_bytes = 0
        if exchange is not None:
            exchange.has_body = True
            if self._wait is _Wait.BODY and exchange is self._exchanges[0]:
                self.wake()

    def on_last_body(self) -> None:
        """Take the end of a body behind which nothing is read any more, not even another offer to upgrade."""
        self.on_message_complete()
        self._is_deaf = True


class _BodyOnly:
    """What a parser calls that only has a body to read."""

    def __init__(self, client: Client) -> None:
        self.on_body = client.on_body
        self.on_message_complete = client.on_last_body


def _size(request: Request) -> int:
    return len(request.target) + sum(len(name) + len(value) + 4 for name, value in request.headers)


def _head_too_large() -> BadRequest:
    message = f"The request's headers are larger than {HEAD_BYTES_MAX} bytes"
    return BadRequest(message, status=431, kind="RequestHeaderFieldsTooLargeError")


def _not_http(error: HttpParserError) -> BadRequest:
    return BadRequest(f"The request cannot be read: {error}")
