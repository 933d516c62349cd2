"""Answers as they are written: framing, lengths, versions, and clients that take them slowly; over real sockets."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.proxy.exchange import Exchange
from tests.proxy.lines import GET, listening

EXPECTS = b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\nExpect: 100-continue\r\n\r\n"


async def stream(exchange: Exchange) -> None:
    exchange.start(200, [(b"X-A", b"1")])
    exchange.write(b"one")
    exchange.write(b"")
    exchange.write(b"two")
    exchange.end(b"three")


async def whole(exchange: Exchange) -> None:
    exchange.respond(200, [(b"X-A", b"1"), (b"x-a", b"2")], b"body")


async def test_whole_answer():
    """An answer in one piece has its headers as they were given, and its length."""
    async with listening(whole) as it, it.talk(GET) as talk:
        head = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nx-a: 2\r\nContent-Length: 4\r\n\r\n"
        assert await talk.answer() == (200, head, b"body")


async def test_stream():
    """A stream without a length is sent in chunks, and the connection is kept."""
    async with listening(stream) as it, it.talk(GET + GET) as talk:
        wanted = b"HTTP/1.1 200 OK\r\nX-A: 1\r\nTransfer-Encoding: chunked\r\n\r\n"
        wanted += b"3\r\none\r\n3\r\ntwo\r\n5\r\nthree\r\n0\r\n\r\n"
        assert await talk.reader.readexactly(2 * len(wanted)) == wanted * 2


async def test_stream_for_http_1_0():
    """A client of HTTP/1.0 gets no chunks: its answer ends with the connection."""
    async with listening(stream) as it, it.talk(b"GET / HTTP/1.0\r\n\r\n") as talk:
        assert await talk.rest() == b"HTTP/1.0 200 OK\r\nX-A: 1\r\nConnection: close\r\n\r\nonetwothree"


@pytest.mark.parametrize("handle", [whole, stream])
async def test_head_requests(handle):
    """A HEAD is answered without a body, and the connection is kept."""
    async with listening(handle) as it, it.talk(GET.replace(b"GET", b"HEAD") * 2) as talk:
        heads = [await talk.head() for _ in range(2)]
        assert heads[0] == heads[1]
        assert heads[0].startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(status: int):
    """Answers that can have no body are sent without one, and without a length."""

    async def bare(exchange: Exchange) -> None:
        exchange.respond(status, [], b"")

    async with listening(bare) as it, it.talk(GET * 2) as talk:
        heads = [await talk.head() for _ in range(2)]
        assert heads == [heads[0].split(b"\r\n")[0] + b"\r\n\r\n"] * 2


async def test_empty_stream():
    """A stream that says nothing is complete all the same."""

    async def silent(exchange: Exchange) -> None:
        exchange.start(299, [])
        exchange.end()

    async with listening(silent) as it, it.talk(GET) as talk:
        wanted = b"HTTP/1.1 299 \r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
        assert await talk.reader.readexactly(len(wanted)) == wanted


@pytest.mark.parametrize(("sent", "is_whole"), [(b"12", False), (b"123", True), (b"1234", False)])
async def test_stream_with_a_length(sent: bytes, is_whole: bool):
    """Where the length was told, an answer of another length cannot be taken for whole."""

    async def told(exchange: Exchange) -> None:
        exchange.start(200, [], 3)
        exchange.write(sent)
        exchange.end()

    async with listening(told) as it, it.talk(GET + GET) as talk:
        first = asyncio.ensure_future(talk.answer())
        if is_whole:
            assert (await first)[2] == sent
            assert (await talk.answer())[2] == sent
        else:
            await asyncio.gather(first, return_exceptions=True)
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await talk.answer()


async def test_cut():
    """An answer that is cut off ends with its connection, before its last chunk; the handler runs on."""
    ended = asyncio.Event()

    async def cuts(exchange: Exchange) -> None:
        exchange.start(200, [])
        exchange.write(b"some")
        await asyncio.sleep(0.05)
        exchange.cut()
        await asyncio.sleep(0.05)
        with pytest.raises(ConnectionResetError):
            exchange.write(b"more")
        ended.set()

    async with listening(cuts) as it, it.talk(GET) as talk:
        await talk.head()
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
            await talk.reader.readuntil(b"0\r\n\r\n")
        await asyncio.wait_for(ended.wait(), 5)


async def test_last_answer():
    """A handler can end the connection with its answer."""

    async def last(exchange: Exchange) -> None:
        exchange.keep_alive = False
        exchange.respond(200, [], b"")

    async with listening(last) as it, it.talk(GET) as talk:
        assert b"Connection: close\r\n" in await talk.rest()


async def test_100_continue():
    """A client that waits for it is told to go on when the body is asked for, and not before."""
    asked, go_on = asyncio.Event(), asyncio.Event()

    async def reads(exchange: Exchange) -> None:
        asked.set()
        await asyncio.wait_for(go_on.wait(), 5)
        exchange.respond(200, [], await exchange.body(10))

    async with listening(reads) as it, it.talk(EXPECTS) as talk:
        await asyncio.wait_for(asked.wait(), 5)
        go_on.set()
        assert await talk.head() == b"HTTP/1.1 100 Continue\r\n\r\n"
        talk.say(b"ab")
        assert (await talk.answer())[::2] == (200, b"ab")


async def test_100_continue_is_not_said_to_who_is_refused():
    """Where the answer needs no body, the client is not made to send one."""
    async with listening(whole) as it, it.talk(EXPECTS) as talk:
        assert (await talk.rest()).startswith(b"HTTP/1.1 200 OK\r\n")


@pytest.mark.parametrize("is_told", [False, True])
async def test_body_beyond_the_limit(is_told: bool):
    """A body beyond the limit is refused as soon as that is known."""
    limit, seen = 100, []

    async def reads(exchange: Exchange) -> None:
        try:
            await exchange.body(limit)
        except Exception as error:
            seen.append(error.status)
            exchange.respond(413, [], b"")

    framing = b"Content-Length: 101" if is_told else b"Transfer-Encoding: chunked"
    body = b"" if is_told else b"65\r\n" + b"x" * 101
    async with listening(reads) as it, it.talk(b"POST / HTTP/1.1\r\nHost: a\r\n%b\r\n\r\n%b" % (framing, body)) as talk:
        assert ((await talk.answer())[0], await talk.rest(), seen) == (413, b"", [413])


async def test_slow_client_is_waited_for():
    """A writer learns that its client is slow, so that what waits to be sent stays bounded; all of it arrives."""
    sent, piece, count = 0, b"x" * 65536, 400

    async def pours(exchange: Exchange) -> None:
        nonlocal sent
        exchange.start(200, [], len(piece) * count)
        for _ in range(count):
            exchange.write(piece)
            sent += 1
            if exchange.is_full:
                await exchange.drained(5)
        exchange.end()

    async with listening(pours) as it, it.talk(GET) as talk:
        before = -1
        while before != sent:
            before = sent
            await asyncio.sleep(0.2)
        assert 0 < sent < count
        await talk.head()
        assert await talk.reader.readexactly(len(piece) * count) == piece * count


async def test_client_that_takes_nothing():
    """A client that takes nothing for too long has left."""
    left = asyncio.Event()

    async def pours(exchange: Exchange) -> None:
        exchange.start(200, [])
        try:
            while True:
                exchange.write(bytes(65536))
                if exchange.is_full:
                    await exchange.drained(0.2)
        except ConnectionResetError:
            left.set()
            raise

    async with listening(pours, keep_alive_s=1.0) as it, it.talk(GET):
        await asyncio.wait_for(left.wait(), 5)
        await it.closed()
