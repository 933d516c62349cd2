"""Takes connections from sockets that listen for several processes, and passes on what is others' share.

A loop's own server would do for one process alone: it accepts and never asks whose turn it is.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Iterable

from kvroute.proxy.peers import Peers

log = logging.getLogger("kvroute.listener")

AT_ONCE = 32  # connections accepted in one turn of the loop
PAUSE_S = 0.5  # when the system has no file descriptors or memory left


class Acceptor:
    """Makes a protocol for each connection.

    Args:
        make: returns the protocol.
        sockets: bound; they are the acceptor's from now on.
        peers: the other processes, None where there are none.
        tls: for connections that are encrypted.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.Protocol],
        sockets: Iterable[socket.socket],
        peers: Peers | None,
        tls: ssl.SSLContext | None,
    ) -> None:
        self._make = make
        self._sockets = list(sockets)
        self._peers = peers
        self._tls = tls
        self._taken = 0  # connections that were taken and are not closed
        self._loop = asyncio.get_running_loop()
        self._greetings: set[asyncio.Task[None]] = set()
        self._pauses: dict[socket.socket, asyncio.TimerHandle] = {}

    def start(self, backlog: int) -> None:
        """Listen.

        Raises:
            OSError: a socket cannot listen.
        """
        for each in self._sockets:
            each.setblocking(False)
            each.listen(backlog)
            self._loop.add_reader(each, self._accept, each)
        if self._peers is not None:
            self._loop.add_reader(self._peers.inbox, self._inherit)
            for connection in self._peers.arrive():
                self._greet(connection)

    def closed(self) -> None:
        """Note that a connection is gone."""
        self._taken -= 1
        if self._peers is not None:
            self._peers.gone()

    def close(self) -> None:
        """Take no more connections; those that were accepted stay open."""
        for each in self._sockets:
            if pause := self._pauses.pop(each, None):
                pause.cancel()
            self._loop.remove_reader(each)
            each.close()
        self._sockets.clear()
        if self._peers is not None:
            self._loop.remove_reader(self._peers.inbox)
            self._inherit()  # nobody else may be there to do it
            self._peers.gone(self._taken)
            self._peers.close()
            self._peers = None

    async def end(self) -> None:
        """Break off the connections that are still being made."""
        greetings = tuple(self._greetings)
        for task in greetings:
            task.cancel()
        await asyncio.gather(*greetings, return_exceptions=True)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                connection, _ = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # out of descriptors: waiting is all that helps
                log.error("no connection can be accepted: %s", error)
                self._loop.remove_reader(listening)
                self._pauses[listening] = self._loop.call_later(PAUSE_S, self._go_on, listening)
                return
            if self._peers is not None and self._peers.place(connection):
                connection.close()
            else:
                self._greet(connection)

    def _go_on(self, listening: socket.socket) -> None:
        del self._pauses[listening]
        self._loop.add_reader(listening, self._accept, listening)

    def _inherit(self) -> None:
        if self._peers is not None:
            for connection in self._peers.take():
                self._greet(connection)

    def _greet(self, connection: socket.socket) -> None:
        self._taken += 1
        connection.setblocking(False)
        task = self._loop.create_task(self._open(connection), name="greet a client")
        self._greetings.add(task)
        task.add_done_callback(self._greetings.discard)

    async def _open(self, connection: socket.socket) -> None:
        try:
            await self._loop.connect_accepted_socket(self._make, connection, ssl=self._tls)
        except OSError as error:  # the client left, or speaks no TLS
            log.debug("a connection was not made: %s", error)
            self.closed()
