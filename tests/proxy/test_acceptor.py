"""Connections that arrive, are given away and are inherited; two acceptors in one process stand for two processes."""

from __future__ import annotations

import array
import asyncio
import resource
import socket
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kvroute.proxy.acceptor import Acceptor
from kvroute.proxy.peers import ABSENT, Peers

WAIT_S = 5.0


class Kept(asyncio.Protocol):
    """A connection that stays open and greets."""

    def __init__(self, side: Side) -> None:
        self.side = side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = transport
        transport.write(self.side.name)
        self.side.open.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.side.open.discard(self)
        self.side.acceptor.closed()


class Side:
    """An acceptor and the connections that it made."""

    def __init__(self, name: bytes, sockets: list[socket.socket], peers: Peers | None) -> None:
        self.name = name
        self.open: set[Kept] = set()
        self.acceptor = Acceptor(lambda: Kept(self), sockets, peers, None)
        self.acceptor.start(64)
        self.counts = peers._counts if peers is not None else None

    async def close(self) -> None:
        self.acceptor.close()
        await self.acceptor.end()
        for kept in tuple(self.open):
            kept.transport.abort()
        await asyncio.sleep(0.01)


def listening() -> socket.socket:
    made = socket.socket()
    made.bind(("127.0.0.1", 0))
    return made


@asynccontextmanager
async def two_sides() -> AsyncIterator[tuple[Side, Side, tuple[str, int]]]:
    """Yield two sides with all connections arriving at the first, and the address."""
    counts = memoryview(array.array("q", [ABSENT, ABSENT]))
    lock = tempfile.TemporaryFile()  # noqa: SIM115 - closed below
    inboxes, outboxes = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)), strict=True)
    public = listening()
    address = public.getsockname()
    one = Side(b"1", [public], Peers(0, counts, lock.fileno(), inboxes[0], {1: outboxes[1]}))
    other = Side(b"2", [], Peers(1, counts, lock.fileno(), inboxes[1], {0: outboxes[0]}))
    try:
        yield one, other, address
    finally:
        await one.close()
        await other.close()
        lock.close()


async def greeted(address: tuple[str, int], count: int) -> tuple[list[bytes], list[asyncio.StreamWriter]]:
    """Open connections and return who greeted each."""

    async def meet() -> tuple[bytes, asyncio.StreamWriter]:
        reader, writer = await asyncio.open_connection(*address)
        return await asyncio.wait_for(reader.readexactly(1), WAIT_S), writer

    met = await asyncio.gather(*(meet() for _ in range(count)))
    return [name for name, _ in met], [writer for _, writer in met]


async def test_alone():
    """Without others an acceptor is a server: it serves until it is closed."""
    public = listening()
    address = public.getsockname()
    side = Side(b"1", [public], None)
    names, writers = await greeted(address, 20)
    assert names == [b"1"] * 20
    side.acceptor.close()
    try:
        await asyncio.open_connection(*address)
        raise AssertionError("it still listens")
    except ConnectionError:
        pass
    assert len(side.open) == 20
    for writer in writers:
        writer.close()
    await side.close()


async def test_connections_are_shared_evenly():
    """Although all of them arrive at one side, both have the same number, also after some have gone."""
    async with two_sides() as (one, other, address):
        names, writers = await greeted(address, 32)
        assert (names.count(b"1"), names.count(b"2")) == (16, 16)
        for name, writer in zip(names, writers, strict=True):
            if name == b"2":
                writer.close()
        async with asyncio.timeout(WAIT_S):
            while other.open:
                await asyncio.sleep(0.01)
        names, more = await greeted(address, 16)
        assert names == [b"2"] * 16
        assert len(one.open) == 16
        for writer in (*writers, *more):
            writer.close()


async def test_a_side_that_closes_counts_nothing():
    """Who takes no connections any more is not counted with those that it still has."""
    async with two_sides() as (one, other, address):
        names, writers = await greeted(address, 10)
        assert names.count(b"2") == 5
        other.acceptor.close()
        assert list(one.counts) == [5, 0]
        for writer in writers:
            writer.close()


async def test_goes_on_when_descriptors_are_free_again(monkeypatch):
    """Out of file descriptors, connections wait in the socket; nothing spins, nothing ends."""
    monkeypatch.setattr("kvroute.proxy.acceptor.PAUSE_S", 0.05)
    public = listening()
    address = public.getsockname()
    side = Side(b"1", [public], None)
    client = socket.create_connection(address, timeout=WAIT_S)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (client.fileno() + 1, hard))
    try:
        await asyncio.sleep(0.2)
        assert not side.open
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    client.setblocking(False)
    assert await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1), WAIT_S) == b"1"
    client.close()
    await side.close()
