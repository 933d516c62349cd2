"""The lean connection, to a real server and to one that is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.redis_link import open_wire
from kvroute.adapters.redis_url import parse_redis_url
from kvroute.adapters.redis_wire import BIG_ARGUMENT_BYTES, Wire, encode
from tests.redis_servers import Server, server


@asynccontextmanager
async def wired(redis: Server) -> AsyncIterator[Wire]:
    target, lost = parse_redis_url(redis.url), asyncio.Event()
    wire = await open_wire(target, target.nodes[0], lost.set)
    try:
        yield wire
    finally:
        wire.abort()
        await lost.wait()


@given(st.lists(st.binary(max_size=40) | st.text(max_size=40) | st.integers(), min_size=1, max_size=6), st.data())
def test_big_arguments_are_not_copied(arguments: list[bytes | int | str], data: st.DataObject):
    """A command is the same bytes whether or not it is cut around its big arguments, which lie in it as they are."""
    big = bytes(BIG_ARGUMENT_BYTES)
    for at in data.draw(st.lists(st.integers(0, len(arguments)), max_size=3)):
        arguments.insert(at, big)
    pieces = encode(*arguments)
    assert b"".join(pieces) == hiredis.pack_command(tuple(arguments))
    assert sum(piece is big for piece in pieces) == arguments.count(big)


async def test_replies_come_in_the_order_of_the_calls():
    """Calls of one turn of the loop go out together, and each gets its own reply, errors included."""
    with server() as redis:
        async with wired(redis) as wire:
            calls = [
                wire.command("SET", "a", b"\x00\r\n"),
                wire.command("GET", "a"),
                wire.command("NO"),
                wire.command("PING"),
            ]
            replies = await asyncio.gather(*calls)
    assert replies[:2] == [b"OK", b"\x00\r\n"]
    assert isinstance(replies[2], hiredis.ReplyError)
    assert replies[3] == b"PONG"


async def test_a_lost_connection_tells_everyone_who_waits():
    """When the server dies, waiting calls fail, and so do later ones, at once."""
    with server() as redis:
        async with wired(redis) as wire:
            waiting = asyncio.ensure_future(wire.command("BLPOP", "nothing", 0))
            await asyncio.sleep(0.05)
            redis.kill()
            with pytest.raises(ConnectionError):
                await waiting
            with pytest.raises(ConnectionError, match="not connected"):
                await wire.command("PING")


async def test_what_is_no_redis_is_dropped():
    """Bytes that are not Redis' protocol end the connection instead of being waited on."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        await reader.read()
        writer.close()
        await writer.wait_closed()

    other = await asyncio.start_server(talk, "127.0.0.1", 0)
    target, lost = parse_redis_url("redis://127.0.0.1"), asyncio.Event()
    wire = await open_wire(target, other.sockets[0].getsockname()[:2], lost.set)
    with pytest.raises(ConnectionError):
        await wire.command("PING")
    await lost.wait()
    other.close()
    await other.wait_closed()


async def test_what_is_under_way_is_bounded():
    """A connection says when so many bytes are under way that nothing more should be sent."""
    with server() as redis:
        async with wired(redis) as wire:
            command, replies = encode("SET", "k", bytes(1 << 20)), []
            while not wire.is_full:
                wire.call(command, replies.append)
            assert 8 <= wire.bytes_in_flight >> 20 <= 32
            await wire.command("PING")
            assert set(replies) == {b"OK"}
            assert not wire.is_full
