"""The door to the replicas: one request out, one answer back, and every way in which that can fail named here.

Only the replica speaks on this side, so this is the one place that turns connection errors into `ReplicaFailed`: above
it, a reset could as well be our own client leaving.

Connections are kept for less time than vLLM keeps them (5.0 s). One can still be dead when it is taken: then, and only
if no byte of an answer was read, the request is sent once more on a new connection. A replica that had begun to work on
the first copy aborts it when it notices the closed socket; generation has no other effect that could be doubled.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from urllib.parse import urlsplit

from msgspec import Struct

from kvroute.adapters.connection import Answer, Connection, Patience
from kvroute.adapters.tls import client_tls
from kvroute.errors import Overloaded, ReplicaUnreachable
from kvroute.routing.replica import Replica

TICK_S = 0.5  # at most between two looks at the clock for all connections: cheaper than a timer for every answer
CLOSE_WAIT_S = 1.0  # for sockets to be gone at shutdown
STARTS_MAX = 64  # of requests to one URL, remembered
SITES_MAX = 4096  # URLs remembered; more than any pool, so that the cache cannot grow with a changing discovery


class UpstreamSettings(Struct, frozen=True, kw_only=True):
    """How long to wait for a replica, and what to keep open to it."""

    connect_timeout_s: float = 5.0
    first_byte_timeout_s: float = 600.0  # a prompt may queue and prefill for minutes
    idle_timeout_s: float = 120.0  # between two chunks
    keep_alive_s: float = 4.0  # vLLM closes idle connections after 5.0 s
    connections_max: int = 10_000  # to one URL
    tls_verify: bool | str = True  # False: any certificate; a path: the authorities to trust


class Upstream:
    """Sends requests to replicas over kept connections."""

    def __init__(
        self, settings: UpstreamSettings | None = None, key_of: Callable[[Replica], str | None] = lambda replica: None
    ) -> None:
        self.settings = settings or UpstreamSettings()
        self.reconnects = 0  # requests sent again because a kept connection was dead
        self._patience = Patience(self.settings.first_byte_timeout_s, self.settings.idle_timeout_s)
        self._key_of = key_of
        self._sites: dict[str, _Site] = {}
        self._tls: ssl.SSLContext | None = None
        shortest_s = min(self.settings.first_byte_timeout_s, self.settings.idle_timeout_s, self.settings.keep_alive_s)
        self._tick_s = min(TICK_S, shortest_s / 4)
        self._tick: asyncio.TimerHandle | None = None
        self._closing = False

    async def start(self) -> None:
        """Get ready; connections are opened when they are needed."""
        self._closing = False

    async def close(self) -> None:
        """Close every connection and wait until the sockets are gone."""
        self._closing = True
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        connections = [connection for site in self._sites.values() for connection in site.connections]
        for connection in connections:
            connection.abort()
        if connections:
            await asyncio.wait([connection.closed for connection in connections], timeout=CLOSE_WAIT_S)
        self._sites.clear()

    @property
    def open_connections(self) -> int:
        """How many sockets are open, idle ones included."""
        return sum(len(site.connections) for site in self._sites.values())

    async def send(
        self, replica: Replica, method: str, target: str, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> Answer:
        """Send a request and wait for the head of the answer.

        Args:
            replica: its URL, rank and key are added to the request.
            method: of the request.
            target: path and query, as the replica shall see them.
            headers: end-to-end headers only; Host, Content-Length, Authorization and the rank are set here.
            body: sent as it is.

        Raises:
            ReplicaUnreachable: no connection, or closed before any byte of the answer.
            ReplicaTimedOut: no byte within the first-byte time.
            ReplicaBroke: an answer that is not HTTP, or that ended within its head.
            Overloaded: too many connections to this URL.
        """
        site = self._site(replica.url)
        head = self._head(site, replica, method, target, headers, len(body))
        connection = site.take(asyncio.get_running_loop().time() - self.settings.keep_alive_s)
        if connection is not None:
            try:
                return await _headed(connection.exchange(head, body, replica=replica.id, patience=self._patience))
            except ReplicaUnreachable:
                self.reconnects += 1
        connection = await self._connect(site, replica)
        return await _headed(connection.exchange(head, body, replica=replica.id, patience=self._patience))

    async def _connect(self, site: _Site, replica: Replica) -> Connection:
        if self._closing:
            raise ReplicaUnreachable("the router is shutting down", replica=replica.id)
        if len(site.connections) >= self.settings.connections_max:
            raise Overloaded(f"{len(site.connections)} requests are open to {site.url}; try again")
        loop = asyncio.get_running_loop()
        connection = Connection(loop, site.freed)
        site.connections.add(connection)  # counts while it connects
        if self._tick is None:
            self._tick = loop.call_later(self._tick_s, self._look_at_the_clock, loop)
        try:
            async with asyncio.timeout(self.settings.connect_timeout_s):
                await loop.create_connection(
                    lambda: connection, site.host, site.port, ssl=self._tls_context() if site.is_tls else None
                )
        except TimeoutError:
            site.connections.discard(connection)
            raise ReplicaUnreachable(
                f"{site.url}: no connection in {self.settings.connect_timeout_s} s", replica=replica.id
            ) from None
        except OSError as error:  # refused, unreachable, unknown host, bad certificate
            site.connections.discard(connection)
            raise ReplicaUnreachable(f"{site.url}: {error.strerror or error}", replica=replica.id) from error
        except BaseException:
            site.connections.discard(connection)
            connection.abort()
            raise
        return connection

    def _look_at_the_clock(self, loop: asyncio.AbstractEventLoop) -> None:
        """Give up on silent answers and close idle connections; again after a while, as long as any is open."""
        now_s, self._tick = loop.time(), None
        for site in self._sites.values():
            for connection in tuple(site.connections):
                connection.check(now_s)
            site.close_idle(now_s - self.settings.keep_alive_s)
            if site.connections and self._tick is None:
                self._tick = loop.call_later(self._tick_s, self._look_at_the_clock, loop)

    def _tls_context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = client_tls(self.settings.tls_verify)
        return self._tls

    def _site(self, url: str) -> _Site:
        site = self._sites.get(url)
        if site is None:
            if len(self._sites) >= SITES_MAX:
                self._sites = {url: site for url, site in self._sites.items() if site.connections}
            site = self._sites[url] = _Site(url)
        return site

    def _head(
        self,
        site: _Site,
        replica: Replica,
        method: str,
        target: str,
        headers: Iterable[tuple[bytes, bytes]],
        body_bytes: int,
    ) -> bytes:
        lines = [site.start_of(method, target)]
        for name, value in headers:
            lines += (name, b": ", value, b"\r\n")
        if key := self._key_of(replica):
            lines.append(f"Authorization: Bearer {key}\r\n".encode("latin-1"))
        if replica.rank is not None:
            lines.append(b"X-data-parallel-rank: %d\r\n" % replica.rank)
        lines.append(b"Content-Length: %d\r\n\r\n" % body_bytes)
        return b"".join(lines)


class _Site:
    """One URL: its address, and the connections that are open to it."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.url = url
        self.is_tls = parts.scheme == "https"
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if self.is_tls else 80)
        self.host_header = parts.netloc.rpartition("@")[2]
        self.prefix = parts.path.rstrip("/")
        self.connections: set[Connection] = set()
        self._free: list[Connection] = []  # the most recently used last
        self._starts: dict[tuple[str, str], bytes] = {}

    def start_of(self, method: str, target: str) -> bytes:
        """Return the first two lines of a request."""
        start = self._starts.get((method, target))
        if start is None:
            start = f"{method} {self.prefix}{target} HTTP/1.1\r\nHost: {self.host_header}\r\n".encode("latin-1")
            if len(self._starts) < STARTS_MAX:
                self._starts[method, target] = start
        return start

    def take(self, oldest_s: float) -> Connection | None:
        """Take the most recently used connection that is still good; close the ones that are too old."""
        while self._free:
            connection = self._free.pop()
            if connection.is_usable and connection.free_since_s > oldest_s:
                return connection
            connection.abort()
        return None

    def freed(self, connection: Connection) -> None:
        """Take back a connection whose exchange is over, or forget one that was closed."""
        if connection.closed.done():
            self.connections.discard(connection)
            return
        connection.free_since_s = connection.loop.time()
        self._free.append(connection)

    def close_idle(self, oldest_s: float) -> None:
        """Close the connections that were free for too long."""
        old = [connection for connection in self._free if connection.free_since_s <= oldest_s]
        if old:
            self._free = [connection for connection in self._free if connection.free_since_s > oldest_s]
        for connection in old:
            connection.abort()


async def _headed(answer: Answer) -> Answer:
    try:
        await answer.head()
    except BaseException:  # cancelled, mostly: the client left, and the engine must hear of it
        answer.close()
        raise
    return answer
