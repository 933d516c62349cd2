"""One connection: order, limits, patience, and leaving; over real sockets."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from kvroute.proxy.client import HEAD_BYTES_MAX, TARGET_BYTES_MAX, WAITING, WAITING_MAX
from kvroute.proxy.exchange import UNREAD_BYTES_MAX, Exchange
from tests.proxy.lines import GET, Served, listening

POST = b"POST /p HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\n\r\nhello"
CHUNKED = b"POST /p HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
FILLER = b"X-A: " + b"a" * 1000 + b"\r\n"


async def refused(it: Served, data: bytes) -> int:
    """Return the status of an answer in OpenAI's shape, behind which the connection is closed."""
    async with it.talk(data) as talk:
        status, head, body = await talk.answer()
        assert (await talk.rest(), json.loads(body)["error"]["code"]) == (b"", status)
        assert b"\r\nConnection: close\r\n" in head
        assert b"\r\nDate: " in head
        assert b"\r\nServer:" not in head
    return status


async def test_requests_in_a_row():
    """A connection is kept and serves one request after the other, in whatever pieces they come."""
    async with listening() as it, it.talk() as talk:
        for _ in range(3):
            for at in range(0, len(POST), 7):
                talk.say(POST[at : at + 7])
                await asyncio.sleep(0.001)
            assert (await talk.answer())[::2] == (200, b"hello")
        assert it.listener.open_connections == 1


async def test_pipelined_requests():
    """Requests that are sent at once are handled one after the other and answered in order."""
    active = 0

    async def one_by_one(exchange: Exchange) -> None:
        nonlocal active
        active += 1
        assert active == 1
        body = await exchange.body(100)
        await asyncio.sleep(0.001)
        active -= 1
        exchange.respond(200, [], body)

    bodies = [b"%d" % number for number in range(100, 100 + WAITING_MAX)]
    async with listening(one_by_one) as it, it.talk() as talk:
        for _ in range(2):
            for body in bodies:
                talk.say(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\n" + body)
                if len(bodies) % WAITING == 0:
                    await asyncio.sleep(0.001)
        assert [(await talk.answer())[2] for _ in range(2 * len(bodies))] == bodies * 2


async def test_too_many_pipelined_requests():
    """Requests beyond a bound are not kept: those before are answered, then the connection is closed."""
    async with listening() as it, it.talk(GET * 1000) as talk:
        statuses = [int(line[9:12]) for line in (await talk.rest()).split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        assert statuses == [200] * (len(statuses) - 1) + [400]
        assert len(statuses) <= WAITING_MAX + 1
        assert it.refused == [400]


async def test_refusal_comes_in_its_turn():
    """What cannot be read is refused after the requests before it are answered."""
    async with listening() as it, it.talk(POST + b"nonsense\r\n\r\n") as talk:
        assert [(await talk.answer())[0] for _ in range(2)] == [200, 400]
        assert await talk.rest() == b""


@pytest.mark.parametrize(
    "data",
    [
        GET.replace(b"Connection", b"").replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        b"GET / HTTP/1.0\r\n\r\n",
        b"GET / HTTP/1.0\r\nConnection: keep-alive\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
        POST.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: upgrade, http2-settings\r\n\r\n"),
        CHUNKED.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n5\r\nhello\r\n0\r\n\r\n"),
    ],
    ids=["close", "1.0", "1.0-keep-alive", "upgrade", "upgrade-with-body", "upgrade-with-chunks"],
)
async def test_last_request(data: bytes):
    """Where a connection cannot be kept, the answer says so and the connection ends; another protocol is not taken."""
    async with listening() as it, it.talk(data) as talk:
        status, head, body = await talk.answer()
        assert (status, body, await talk.rest()) == (200, b"hello" if b"POST" in data else b"", b"")
        assert b"\r\nConnection: close\r\n" in head
        assert head.startswith(b"HTTP/1.0 " if b"HTTP/1.0" in data else b"HTTP/1.1 ")


async def test_nothing_is_read_behind_the_last_request():
    """What follows a request that is the last one is not handled."""
    async with listening() as it, it.talk(GET.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n") + GET) as talk:
        assert (await talk.rest()).count(b"HTTP/1.1 200") == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET / HTTP/1.1\nHost: a\n\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA: b\r\n folded\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA: b\rc\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA : b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA(: b\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nA: b\0\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nHost: a\r\n\r\n",
        b"GET / HTTP/1.1 \r\nHost: a\r\n\r\n",
        POST.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n"),
        POST.replace(b"\r\n\r\n", b"\r\nContent-Length: 5\r\n\r\n"),
        POST.replace(b": 5", b": +5"),
        POST.replace(b": 5", b": 5, 5"),
        POST.replace(b": 5", b": 99999999999999999999"),
        CHUNKED.replace(b": chunked", b": chunked, chunked"),
    ],
)
async def test_broken_heads(data: bytes):
    """A head that two readers could read differently is refused, and counted."""
    async with listening() as it:
        assert (await refused(it, data), it.refused) == (400, [400])


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * TARGET_BYTES_MAX + b" HTTP/1.1\r\nHost: a\r\n\r\n", 414),
        (b"GET /" + b"a" * 2 * TARGET_BYTES_MAX, 414),
        (GET[:-2] + FILLER * (HEAD_BYTES_MAX // 1000 + 1) + b"\r\n", 431),
        (GET[:-2] + FILLER * 200, 431),
        (GET[:-2] + b"X-A: " + b"a" * 2 * HEAD_BYTES_MAX, 431),
        (b"\r\n" * HEAD_BYTES_MAX, 431),
        (GET.replace(b"1.1", b"2.0"), 505),
        (b"GET /\r\n\r\n", 505),
        (b"CONNECT a:1 HTTP/1.1\r\nHost: a\r\n\r\n", 501),
        (POST.replace(b"Host", b"Expect: more\r\nHost"), 417),
        (CHUNKED.replace(b": chunked", b": gzip, chunked"), 501),
    ],
    ids=lambda value: str(value)[:40],
)
async def test_limits(data: bytes, status: int):
    """Heads that are too large, and what is not done here, are refused with the status that says so."""
    async with listening() as it:
        assert await refused(it, data) == status


@pytest.mark.parametrize(
    "chunks",
    [b"zz\r\n", b"5 \r\nhello\r\n0\r\n\r\n", b"5\r\nhelloo\r\n", b"-1\r\n", b"5\nhello\n", b"F" * 17 + b"\r\n"],
)
async def test_broken_chunks(chunks: bytes):
    """A body whose chunks are broken is the handler's to refuse; the connection ends."""
    seen = []

    async def reads(exchange: Exchange) -> None:
        try:
            await exchange.body(100)
        except Exception as error:
            seen.append(str(error))
            exchange.respond(400, [], b"no")

    async with listening(reads) as it, it.talk(CHUNKED + chunks) as talk:
        assert ((await talk.answer())[::2], await talk.rest()) == ((400, b"no"), b"")
        assert "cannot be read" in seen[0]


async def test_chunks():
    """Chunks are put together; extensions and trailers are passed over."""
    async with listening() as it, it.talk(CHUNKED) as talk:
        for piece in (b"3;a=b\r\nab", b"c\r\n", b"00a\r\n0123", b"456789\r\n0\r", b"\nT: v\r\n\r\n" + GET):
            talk.say(piece)
            await asyncio.sleep(0.005)
        assert (await talk.answer())[2] == b"abc0123456789"
        assert (await talk.answer())[0] == 200


async def test_trailers_that_claim_a_body():
    """A coding behind the last chunk is refused: somebody before this router may have believed it."""
    async with listening() as it, it.talk(CHUNKED + b"2\r\nok\r\n0\r\nTransfer-Encoding: gzip\r\n\r\n" + GET) as talk:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # the echo has no answer for broken bodies
            await talk.answer()


@pytest.mark.parametrize("split", [False, True], ids=["in one piece", "in two"])
async def test_an_upgrade_behind_an_upgrade(split: bool):
    """Behind a request whose upgrade was declined nothing is read, not even another offer."""
    offer = b"\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n"
    first, second = POST.replace(b"\r\n\r\n", offer), GET.replace(b"\r\n\r\n", offer)
    async with listening() as it, it.talk(first if split else first + second) as talk:
        assert (await talk.answer())[2] == b"hello"
        if split:
            talk.say(second)
        with suppress(ConnectionError):
            assert await talk.rest() == b""


async def test_endless_trailers():
    """Trailers are bounded as headers are."""
    async with listening() as it, it.talk(CHUNKED + b"0\r\n" + FILLER * 80) as talk:
        with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):  # the echo has no answer for broken bodies
            await talk.answer()


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", b""), (GET[:5], b"408 "), (GET, b""), (GET + GET[:5], b"408 ")],
    ids=["nothing", "half a head", "idle", "half a second head"],
)
async def test_slow_clients(data: bytes, said: bytes):
    """Who is silent is let go: without a word between requests, with one within a head, however it drips."""
    async with listening(head_s=0.2, keep_alive_s=0.2) as it, it.talk(data) as talk:
        if data.startswith(GET):
            assert (await talk.answer())[0] == 200
        if said:
            for byte in b"a" * 20:
                talk.say(bytes([byte]))
                await asyncio.sleep(0.02)
        assert (await talk.rest())[9:13] == said


async def test_slow_body():
    """A body that does not come is not waited for without end."""
    seen = []

    async def reads(exchange: Exchange) -> None:
        try:
            await exchange.body(100)
        except Exception as error:
            seen.append(error)
            exchange.respond(error.status, [], b"")

    async with listening(reads, body_idle_s=0.2) as it, it.talk(POST[:-2]) as talk:
        assert ((await talk.answer())[0], await talk.rest()) == (408, b"")


@pytest.mark.parametrize("has_begun", [False, True])
async def test_client_that_leaves(has_begun: bool):
    """When the client leaves, the handler is cancelled at once, before and after the answer began."""
    waits, left = asyncio.Event(), asyncio.Event()

    async def hangs(exchange: Exchange) -> None:
        if has_begun:
            exchange.start(200, [])
            exchange.write(b"first")
        waits.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            left.set()
            raise

    async with listening(hangs) as it, it.talk(GET) as talk:
        await asyncio.wait_for(waits.wait(), 5)
        talk.leave()
        await asyncio.wait_for(left.wait(), 5)
        await it.closed()


async def test_client_that_leaves_within_its_body():
    """Who leaves before all of the request was sent ends the handler as well."""
    left = asyncio.Event()

    async def reads(exchange: Exchange) -> None:
        try:
            await exchange.body(100)
        except asyncio.CancelledError:
            left.set()
            raise

    async with listening(reads) as it, it.talk(POST[:-2]) as talk:
        await asyncio.sleep(0.05)
        talk.writer.close()
        await asyncio.wait_for(left.wait(), 5)


async def test_body_that_nobody_reads():
    """A body is not taken in before the handler asks for it, beyond a bound; then all of it arrives."""
    go_on, size = asyncio.Event(), 16 << 20

    async def late(exchange: Exchange) -> None:
        await asyncio.wait_for(go_on.wait(), 5)
        exchange.respond(200, [], b"%d" % len(await exchange.body(size)))

    async with (
        listening(late) as it,
        it.talk(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size) as talk,
    ):
        talk.say(bytes(size))
        await asyncio.sleep(0.2)
        waiting = talk.writer.transport.get_write_buffer_size()
        assert waiting > size // 2 > UNREAD_BYTES_MAX
        go_on.set()
        assert (await talk.answer())[2] == b"%d" % size


async def test_answer_before_the_body():
    """Who is answered while still sending gets the whole answer, not a reset; the connection ends."""

    async def refuses(exchange: Exchange) -> None:
        exchange.respond(413, [], b"x" * 100_000)

    size = 8 << 20
    async with (
        listening(refuses) as it,
        it.talk(b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % size, limit=1 << 20) as talk,
    ):
        talk.say(bytes(size))
        assert (await talk.answer())[0] == 413
        assert await talk.rest() == b""


async def test_handler_that_fails(caplog: pytest.LogCaptureFixture):
    """A handler that fails or does not answer breaks its own connection off, and nothing else."""

    async def fails(exchange: Exchange) -> None:
        if exchange.request.path == "/p":
            raise RuntimeError("a mistake")

    async with listening(fails) as it:
        for data in (POST, GET):
            async with it.talk(data) as talk:
                with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                    await talk.answer()
        await it.closed()
    assert caplog.text.count("RuntimeError: a mistake") == 1
