"""The listener's life: starting, stopping, closing, and bytes from hell with h11 as the reference."""

from __future__ import annotations

import ast
import asyncio
import socket
from random import Random

import pytest

from kvroute.proxy.exchange import Exchange
from kvroute.proxy.listener import Listener
from tests.fuzz.reference import Read, normal, reference
from tests.proxy.lines import GET, echo, listening

CLOSE = b"GET / HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n"


async def test_serves_on_a_free_port():
    """Port 0 takes a free port and tells it."""
    async with listening() as it, it.talk(GET) as talk:
        assert (await talk.answer())[0] == 200


async def test_taken_port():
    """A port that is taken is an OSError."""
    async with listening() as it:
        with pytest.raises(OSError, match="in use"):
            await Listener(echo).start("127.0.0.1", it.port)


async def test_stop_closes_idle_connections_and_lets_requests_end():
    """After the stop nobody is let in, idle connections are closed, and what is under way is answered and closed."""
    go_on = asyncio.Event()

    async def waits(exchange: Exchange) -> None:
        if exchange.request.path == "/slow":
            await asyncio.wait_for(go_on.wait(), 5)
        exchange.respond(200, [], b"")

    async with listening(waits) as it, it.talk(GET) as idle, it.talk(GET.replace(b"/ ", b"/slow ", 1)) as busy:
        assert (await idle.answer())[0] == 200
        while it.listener.open_connections < 2:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        it.listener.stop_accepting()
        assert await idle.rest() == b""
        with pytest.raises(OSError, match=r"refused|Connect call failed"):
            await asyncio.open_connection("127.0.0.1", it.port)
        go_on.set()
        status, head, _ = await busy.answer()
        assert (status, await busy.rest()) == (200, b"")
        assert b"Connection: close\r\n" in head


async def test_close_breaks_off():
    """Closing cancels what is under way and leaves neither task nor socket."""
    cancelled = asyncio.Event()

    async def hangs(exchange: Exchange) -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async with listening(hangs) as it, it.talk(GET) as talk:
        while not it.listener.open_connections:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        await it.listener.close()
        assert cancelled.is_set()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await talk.answer()


CHUNKS = b"3;ext=1\r\nabc\r\nA\r\n0123456789\r\n0\r\nTrailer: x\r\n\r\n"
SEEDS = [
    CLOSE,
    b"GET http://h:1/p?q HTTP/1.1\r\nHost: a\r\n\r\n" + CLOSE,
    b"POST /v1/x?y=z HTTP/1.1\r\nHost: a.b:80\r\nContent-Length: 5\r\nX-A: \xe9 b\t\r\n\r\nhello" + CLOSE,
    b"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nExpect: 100-continue\r\n\r\n" + CHUNKS + CLOSE,
    b"POST / HTTP/1.0\r\nContent-Length: 3\r\nA: b\r\n\r\nabc",
    b"POST / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade, close\r\nUpgrade: h2c\r\nContent-Length: 1\r\n\r\nx",
]
PIECES = [b"\r", b"\n", b"\r\n", b" ", b"\t", b"\0", b":", b";", b",", b"0", b"f", b"-", b"+", b"\x7f", b"\xff", b"%"]
PIECES += [
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Host: b\r\n",
    b" folded\r\n",
    b"chunked",
    b"#",
]
PIECES += [b"Expect: x\r\n", b"CONNECT", b"HTTP/1.0", b"HTTP/2.0", b"HTTP/0.9", b"identity", b"\r\n\r\n", b"0\r\n\r\n"]


def mutated(random: Random) -> bytes:
    """Make bytes that were a request once."""
    data = bytearray(random.choice(SEEDS))
    for _ in range(random.choice((1, 1, 1, 2, 3, 6))):
        at = random.randrange(len(data) + 1)
        what = random.randrange(5)
        if what == 0:
            data[at : at + 1] = bytes([random.randrange(256)])
        elif what == 1:
            del data[at : at + random.choice((1, 1, 2, 8))]
        elif what == 2:
            start = random.randrange(len(data) + 1)
            data[at:at] = data[start : start + random.randrange(40)]
        else:
            data[at:at] = random.choice(PIECES)
    return bytes(data)


def accepted(answers: bytes) -> list[Read]:
    """Return what the echoing handler has seen, from its answers."""
    found = []
    for line in answers.split(b"\r\n"):
        if line.startswith(b"X-Seen: "):
            method, target, version, headers, body = ast.literal_eval(line[8:].decode())
            found.append((method, target, version, normal(headers), body))
    return found


@pytest.mark.slow
async def test_reads_nothing_that_h11_does_not_read():
    """Of requests that were damaged, none is accepted that h11 refuses or reads otherwise; nothing leaks."""
    random = Random(1)

    async def attempt(it, data: bytes) -> bytes:
        async with it.talk() as talk:
            cut = random.randrange(len(data) + 1) if random.random() < 0.5 else len(data)
            talk.say(data[:cut])
            if cut < len(data):
                await asyncio.sleep(0)
                talk.say(data[cut:])
            try:
                return await talk.rest()
            except ConnectionError:
                return b""

    async with listening(head_s=0.2, body_idle_s=0.2, keep_alive_s=0.2) as it:
        for _ in range(15):
            cases = [mutated(random) for _ in range(200)]
            answers = await asyncio.gather(*(attempt(it, data) for data in cases))
            for data, answer in zip(cases, answers, strict=True):
                got = accepted(answer)
                assert got == reference(data)[: len(got)], data
        await it.closed()


async def test_backlog_of_connections():
    """A thousand connections that say nothing cost nobody else anything and are closed in time."""
    async with listening(head_s=0.4) as it:
        sockets = [socket.create_connection(("127.0.0.1", it.port)) for _ in range(200)]
        async with it.talk(GET) as talk:
            assert (await talk.answer())[0] == 200
        await it.closed()
        for each in sockets:
            each.close()
