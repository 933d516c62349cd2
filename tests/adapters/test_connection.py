"""One connection and its answer, against a replica that sends whatever bytes the test wants."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvroute.adapters.connection import HEAD_LIMIT_BYTES, HIGH_WATER_BYTES, Answer
from kvroute.adapters.upstream import Upstream, UpstreamSettings
from kvroute.errors import ReplicaBroke, ReplicaTimedOut, ReplicaUnreachable
from kvroute.routing.replica import Replica, ReplicaId
from tests.adapters.scripted import Script, Server, Turn, scripted


@asynccontextmanager
async def asked(script: Script, **settings: float) -> AsyncIterator[tuple[Answer, Server]]:
    """Send one request to a scripted replica; gives the answer, whose head has arrived."""
    upstream = Upstream(UpstreamSettings(**settings))
    async with scripted(script) as server:
        replica = Replica(id=ReplicaId("r0"), url=server.url)
        answer = await upstream.send(replica, "POST", "/v1/completions", [], b"{}")
        try:
            yield answer, server
        finally:
            answer.close()
            await upstream.close()


async def whole(answer: Answer) -> bytes:
    parts = []
    while part := await answer.read():
        parts.append(part)
    return b"".join(parts)


async def test_body_with_a_length():
    """Status, headers and body arrive as they were sent."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 404 Not Found\r\nContent-Length: 5\r\nX-Odd:  a, b \r\n\r\nhello")

    async with asked(script) as (answer, _):
        assert (answer.status, await whole(answer)) == (404, b"hello")
        assert (b"X-Odd", b"a, b ") in answer.headers or (b"X-Odd", b"a, b") in answer.headers


async def test_chunks_come_as_they_are_sent():
    """A chunk can be read before the next one was sent."""
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        await turn.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with asked(script) as (answer, _):
        assert await answer.read() == b"one"
        go_on.set()
        assert await whole(answer) == b"two"


async def test_body_that_ends_with_the_connection():
    """A body without a length or chunks ends where the connection ends."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")
        turn.writer.close()

    async with asked(script) as (answer, _):
        assert await whole(answer) == b"until the end"


async def test_interim_answers_are_passed_over():
    """100 Continue and 103 Early Hints are not the answer."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n")
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    async with asked(script) as (answer, _):
        assert (answer.status, await whole(answer)) == (200, b"ok")


async def test_cut_within_the_body():
    """What had arrived before the cut is read first; then the cut is an error of the replica."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf")
        turn.writer.close()

    async with asked(script) as (answer, _):
        assert await answer.read() == b"half"
        with pytest.raises(ReplicaBroke, match="r0"):
            await answer.read()


async def test_endless_trailers_are_cut_off():
    """Trailers are thrown away, and more of them than a head may have are not read on."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(4 * HEAD_LIMIT_BYTES // 1000):
                await turn.send(b"X-A: " + b"y" * 1000 + b"\r\n")
            await turn.client_left()

    async with asked(script) as (answer, _):
        assert await answer.read() == b"ok"
        with pytest.raises(ReplicaBroke, match="headers are larger"):
            await answer.read()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (b"", ReplicaUnreachable),
        (b"HTTP/1.1 200 OK\r\nContent-Le", ReplicaBroke),
        (b"220 smtp.example ready\r\n", ReplicaBroke),
        (b"HTTP/1.1 200 OK\r\nX: " + b"y" * HEAD_LIMIT_BYTES, ReplicaBroke),
        (b"\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", ReplicaBroke),
        (
            b"HTTP/1.1 103 Early Hints\r\nContent-Length: 2\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n",
            ReplicaBroke,
        ),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", ReplicaBroke),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nabc", ReplicaBroke),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\t\r\n\r\n0\r\n\r\n", ReplicaBroke),
    ],
    ids=[
        "nothing",
        "half a head",
        "not HTTP",
        "endless head",
        "an empty line before it",
        "hints with a body",
        "chunked twice",
        "another coding",
        "a coding that only looks like chunked",
    ],
)
async def test_no_head(sent: bytes, error: type[Exception]):
    """Without a sound head there is no answer, and the error says how far the replica came."""

    async def script(turn: Turn) -> None:
        await turn.send(sent)
        turn.writer.close()

    with pytest.raises(error, match="r0"):
        async with asked(script):
            pass


async def test_trailers_that_claim_a_body():
    """A coding behind the last chunk makes the whole answer unsound, although all of its body was read."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n")
        await turn.send(b"0\r\nTransfer-Encoding: gzip\r\n\r\n")

    async with asked(script) as (answer, _):
        assert await answer.read() == b"ok"
        with pytest.raises(ReplicaBroke, match="not HTTP"):
            await answer.read()


async def test_an_old_connection_is_not_used_again():
    """HTTP/1.0 is taken at its word that it closes, whatever else it says."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.0 200 OK\r\nConnection: close, keep-alive\r\nContent-Length: 2\r\n\r\nok")
        await turn.client_left()

    async with asked(script) as (answer, server):
        assert await whole(answer) == b"ok"
        async with asyncio.timeout(5):
            while server.turns[0].reader.at_eof() is False:
                await asyncio.sleep(0.01)


async def test_silence_before_the_first_byte():
    """The time for the first byte lasts until the body begins: servers send the head of a stream before its prefill."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        await turn.client_left()

    async with asked(script, first_byte_timeout_s=0.2, idle_timeout_s=0.05) as (answer, _):
        with pytest.raises(ReplicaTimedOut, match="no answer in time"):
            await answer.read()


async def test_silence_within_a_stream():
    """A stream that stays open and says nothing is given up after the idle time."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await turn.client_left()

    async with asked(script, idle_timeout_s=0.05) as (answer, _):
        assert await answer.read() == b"one"
        with pytest.raises(ReplicaTimedOut, match="silent for"):
            await answer.read()


async def test_time_spent_elsewhere_is_not_silence():
    """A reader that was busy longer than the idle time still gets what comes then."""
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await go_on.wait()
        await turn.send(b"3\r\ntwo\r\n0\r\n\r\n")

    async with asked(script, idle_timeout_s=0.1) as (answer, _):
        assert await answer.read() == b"one"
        await asyncio.sleep(0.25)
        go_on.set()
        assert await whole(answer) == b"two"


async def test_unread_body_stops_the_replica():
    """A body that nobody reads is not taken into memory beyond the high-water mark, and arrives whole in the end."""
    size, sent = 64 << 20, 0

    async def script(turn: Turn) -> None:
        nonlocal sent
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            await turn.send(bytes(1 << 20))
            sent += 1 << 20

    async with asked(script) as (answer, _):
        before = -1
        while sent != before:  # until the replica can send no more
            before = sent
            await asyncio.sleep(0.1)
        assert sent < size // 2
        assert len(await answer.read()) < 4 * HIGH_WATER_BYTES
        assert len(await whole(answer)) > size // 2


async def test_closing_an_unfinished_answer_closes_the_connection():
    """An engine learns that nobody wants its answer from the closed connection."""
    left = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
        await turn.client_left()
        left.set()

    async with asked(script) as (answer, _):
        answer.close()
        await asyncio.wait_for(left.wait(), 5)


async def test_second_answer_behind_the_first():
    """Bytes behind an answer never become the answer to the next request."""

    async def script(turn: Turn) -> None:
        extra = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil" if turn.connection == 0 else b""
        await turn.send(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\ngood" + extra)

    async with scripted(script) as server:
        upstream, replica = Upstream(), Replica(id=ReplicaId("r0"), url=server.url)
        for _ in range(2):
            answer = await upstream.send(replica, "POST", "/", [], b"")
            assert await whole(answer) == b"good"
        assert server.connections == 2
        await upstream.close()
