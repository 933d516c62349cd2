"""The public listener: sockets in, exchanges out. HTTP/1.1 and 1.0, on asyncio's loop or uvloop's.

It knows no route. What it keeps: the open connections, and one clock for all of their waits. How many connections there
may be is the operating system's limit on open files.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Iterable

from kvroute.proxy.acceptor import Acceptor
from kvroute.proxy.client import Client, ClientPatience, Handle
from kvroute.proxy.peers import Peers

TICK_S = 0.5  # at most between two looks at the clock
CLOSE_WAIT_S = 5.0  # for handlers that were cancelled to end
BACKLOG = 2048


class Listener:
    """Calls `handle` once for each request."""

    def __init__(
        self,
        handle: Handle,
        patience: ClientPatience | None = None,
        *,
        on_refused: Callable[[int], None] = lambda status: None,
    ) -> None:
        """Take the handler, and who is told the status of requests that never reach it."""
        self._handle = handle
        self._patience = patience or ClientPatience()
        self._on_refused = on_refused
        self._clients: set[Client] = set()
        self._server: asyncio.Server | None = None
        self._acceptor: Acceptor | None = None
        self._tick: asyncio.TimerHandle | None = None
        shortest_s = min(self._patience.keep_alive_s, self._patience.head_s, self._patience.body_idle_s)
        self._tick_s = min(TICK_S, shortest_s / 4)

    @property
    def open_connections(self) -> int:
        """How many sockets are open, idle ones included."""
        return len(self._clients)

    async def start(self, host: str, port: int, tls: ssl.SSLContext | None = None) -> int:
        """Listen; returns the port.

        Raises:
            OSError: the address cannot be had.
        """
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(self._client, host or None, port, backlog=BACKLOG, ssl=tls)
        return int(self._server.sockets[0].getsockname()[1])

    def start_on(
        self, sockets: Iterable[socket.socket], peers: Peers | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        """Listen on sockets that are bound already, as one of several processes; they are the listener's from now on.

        Raises:
            OSError: a socket cannot listen.
        """
        self._acceptor = Acceptor(self._client, sockets, peers, tls)
        self._acceptor.start(BACKLOG)

    def stop_accepting(self) -> None:
        """Take no new connections, close the idle ones, and the others when their requests are answered."""
        if self._server is not None:
            self._server.close()
        if self._acceptor is not None:
            self._acceptor.close()
        for client in tuple(self._clients):
            client.hang_up()

    async def close(self) -> None:
        """Break off what is left and wait until it has ended."""
        self.stop_accepting()
        if self._acceptor is not None:
            await self._acceptor.end()
        clients = tuple(self._clients)
        for client in clients:
            client.end()
        tasks = [client.task for client in clients if client.task is not None]
        if tasks:
            await asyncio.wait(tasks, timeout=CLOSE_WAIT_S)
        if self._tick is not None:
            self._tick.cancel()
            self._tick = None
        await asyncio.sleep(0)  # sockets that were broken off are closed in the next round of the loop
        self._server = self._acceptor = None

    def _client(self) -> Client:
        return Client(
            self._handle,
            self._patience,
            on_open=self._opened,
            on_close=self._closed,
            on_refused=self._on_refused,
        )

    def _opened(self, client: Client) -> None:
        self._clients.add(client)
        if self._tick is None:
            self._tick = asyncio.get_running_loop().call_later(self._tick_s, self._look_at_the_clock)

    def _closed(self, client: Client) -> None:
        self._clients.discard(client)
        if self._acceptor is not None:
            self._acceptor.closed()

    def _look_at_the_clock(self) -> None:
        """Look at every connection's wait; again after a while, as long as any is open."""
        loop = asyncio.get_running_loop()
        now_s, self._tick = loop.time(), None
        for client in tuple(self._clients):
            client.check(now_s)
        if self._clients:
            self._tick = loop.call_later(self._tick_s, self._look_at_the_clock)
