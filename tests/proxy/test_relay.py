"""Answers carried from a replica to a client: byte for byte, as they come, and visibly broken where they break."""

from __future__ import annotations

import asyncio
import json
import re

import aiohttp
import pytest

from kvroute.adapters.upstream import UpstreamSettings
from kvroute.proxy.dispatch import DispatchSettings
from kvroute.proxy.relay import WHOLE_BYTES_MAX
from tests.adapters.scripted import Turn, scripted
from tests.proxy.harness import Pool, chat, pool

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
STREAM = {"Content-Type": "text/event-stream"}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def named(body: bytes) -> bytes:
    """A body without what differs between two equal requests: ids, times, and what the first one left in the cache."""
    body = re.sub(rb'"(id|system_fingerprint)":"[^"]*"', rb'"\1":""', body)
    return re.sub(rb'"(created|cached_tokens|created_cache_tokens)":\d+', rb'"\1":0', body)


async def post(it: Pool, url: str, path: str, body: dict[str, object]) -> tuple[int, bytes]:
    async with it.session.post(url + path, json=body) as answer:
        return answer.status, await answer.read()


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, chat()),
        (CHAT, chat(stream=True)),
        (CHAT, chat(stream=True, stream_options={"include_usage": True})),
        (CHAT, chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})),
        (CHAT, chat(stream=True, stream_options={"include_usage": False, "continuous_usage_stats": True})),
        (CHAT, chat(stream=True, stream_options=None)),
        (CHAT, chat(stream=True, n=3)),
        (CHAT, chat(stream=True, n=2, stream_options={"include_usage": True})),
        (CHAT, chat(stream=True, return_token_ids=True)),
        (CHAT, chat(max_tokens=0)),
        (CHAT, chat(messages=[])),
        (COMPLETION, {"model": "sim", "prompt": "def main():", "max_tokens": 5}),
        (COMPLETION, {"model": "sim", "prompt": "def main():", "max_tokens": 5, "stream": True}),
        (COMPLETION, {"model": "sim", "prompt": ["a b", "c d"], "max_tokens": 5, "stream": True}),
        (COMPLETION, {"model": "sim", "prompt": [1, 2, 3], "stream": True, "stream_options": {"include_usage": True}}),
        (COMPLETION, {"model": "sim", "prompt": [[1, 2], [3]], "n": 2}),
        (COMPLETION, {"model": "sim", "stream": True}),
        ("/tokenize", {"model": "sim", "prompt": "hello world"}),
    ],
    ids=lambda value: json.dumps(value)[-60:] if isinstance(value, dict) else value,
)
async def test_equal_to_a_direct_answer(path: str, body: dict[str, object]):
    """What a client gets through the router equals what the replica says directly, ids and times aside."""
    async with pool(1) as it:
        direct = await post(it, it.replicas[0], path, body)
        ours = await post(it, it.url, path, body)
        assert (ours[0], named(ours[1])) == (direct[0], named(direct[1]))


async def test_usage_is_known_of_streams_that_did_not_ask():
    """For the account every stream tells its usage; the client that did not ask sees none."""
    async with pool(1) as it:
        _, body = await post(it, it.url, CHAT, chat(stream=True))
        assert b"usage" not in body
        sums = {field: delta for bucket, field, delta in it.account.drain() if bucket == 0}
        assert sums["all|completion_tokens"] == 8
        assert sums["all|known_prompt_tokens"] > 0


async def test_events_come_as_they_are_sent():
    """An event reaches the client before the replica has sent the next one."""
    go_on = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(HEAD + chunk(TEXT))
        await asyncio.wait_for(go_on.wait(), 5)
        await turn.send(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async with (
        scripted(script) as server,
        pool(urls=[server.url]) as it,
        it.session.post(it.url + CHAT, json=chat(stream=True)) as answer,
    ):
        assert await answer.content.readany() == TEXT
        go_on.set()
        assert await answer.content.read() == b"data: [DONE]\n\n"


async def test_connection_that_breaks_within_a_stream():
    """The client of a stream that breaks gets an error event, no [DONE], and the end of the connection."""

    async def script(turn: Turn) -> None:
        await turn.send(HEAD + chunk(TEXT) + chunk(TEXT[:20]))
        turn.writer.close()

    async with scripted(script) as server, pool(urls=[server.url]) as it:
        _, body = await post(it, it.url, CHAT, chat(stream=True))
        first, second = body.removesuffix(b"\n\n").split(b"\n\n")
        assert first + b"\n\n" == TEXT
        assert json.loads(second.removeprefix(b"data: "))["error"]["code"] == 502
        assert it.stats.requests == {("failed", 200): 1}


@pytest.mark.parametrize(
    ("kind", "ending"), [("error_after", b"data: [DONE]\n\n"), ("cut_stream", b'"code":502}}\n\n')]
)
async def test_engine_that_breaks_within_a_stream(kind: str, ending: bytes):
    """An engine's own error event is passed on as it is; a cut becomes one. Either way the replica has failed."""
    async with pool(1) as it:
        await it.fault(0, kind)
        status, body = await post(it, it.url, CHAT, chat(stream=True))
        assert status == 200
        assert b'"error"' in body
        assert body.endswith(ending)
        assert it.stats.requests == {("failed", 200): 1}
        assert it.in_flight() == 0


async def test_stream_that_falls_silent():
    """A stream that says nothing more is ended with an error after the idle time."""
    async with pool(1, upstream=UpstreamSettings(idle_timeout_s=0.3)) as it:
        await it.fault(0, "silent_stream")
        _, body = await post(it, it.url, CHAT, chat(stream=True))
        assert b'"code":504' in body
        assert it.in_flight() == 0


async def test_large_answer():
    """An answer too large to be looked at arrives whole."""
    data = bytes(range(256)) * (WHOLE_BYTES_MAX // 64)

    async def script(turn: Turn) -> None:
        head = b"HTTP/1.1 200 OK\r\nContent-Type: application/octet-stream\r\nContent-Length: %d\r\n\r\n" % len(data)
        await turn.send(head + data)

    async with scripted(script) as server, pool(urls=[server.url]) as it:
        assert await post(it, it.url, "/v1/embeddings", {"model": "sim"}) == (200, data)


async def test_large_answer_that_breaks():
    """Where a large answer breaks off, so does the client's connection: it cannot be taken for whole."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk(bytes(2 * WHOLE_BYTES_MAX)))
        turn.writer.close()

    async with scripted(script) as server, pool(urls=[server.url]) as it:
        with pytest.raises(aiohttp.ClientError):
            await post(it, it.url, "/v1/embeddings", {"model": "sim"})
        await it.eventually(lambda: it.stats.requests == {("failed", 200): 1}, "counted as failed")


async def test_slow_client_slows_the_replica():
    """What a client does not take is not read from the replica, so that no stream fills the router's memory."""
    size, sent = 64 << 20, 0
    event = b"data: " + b"x" * (1 << 16) + b"\n\n"

    async def script(turn: Turn) -> None:
        nonlocal sent
        await turn.send(HEAD)
        while sent < size:
            await turn.send(chunk(event))
            sent += len(event)
        await turn.send(b"0\r\n\r\n")

    async with (
        scripted(script) as server,
        pool(urls=[server.url]) as it,
        it.session.post(it.url + CHAT, json=chat(stream=True)) as answer,
    ):
        before = -1
        while sent != before:
            before = sent
            await asyncio.sleep(0.2)
        assert sent < size // 2
        assert len(await answer.read()) == sent == len(event) * -(-size // len(event))


async def test_client_that_takes_nothing():
    """A client that stays and takes nothing is taken to have left: it may not occupy an engine for ever."""
    left = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.send(HEAD)
        try:
            while True:
                await turn.send(chunk(b"data: " + b"x" * (1 << 16) + b"\n\n"))
        except ConnectionError:
            left.set()
            raise

    settings = DispatchSettings(client_stall_s=0.3)
    async with (
        scripted(script) as server,
        pool(urls=[server.url], dispatch=settings) as it,
        it.session.post(it.url + CHAT, json=chat(stream=True)),
    ):
        await asyncio.wait_for(left.wait(), 10)
        await it.eventually(lambda: it.stats.requests == {("abandoned", 499): 1}, "counted as abandoned")


async def test_status_of_the_client_s_own_mistake():
    """An engine's refusal is the client's answer, and no failure of the replica."""
    async with pool(1) as it:
        status, body = await post(it, it.url, CHAT, chat(temperature=-1))
        assert (status, json.loads(body)["error"]["param"]) == (400, "temperature")
        assert it.stats.requests == {("done", 400): 1}
        assert "failed" not in repr(it.fleet)


async def test_named_events_are_passed():
    """Streams of other APIs, with named events, pass as they are."""
    event = b'event: message_start\ndata: {"type":"message_start"}\n\n'

    async def script(turn: Turn) -> None:
        await turn.send(HEAD + chunk(event[:9]) + chunk(event[9:] + event) + b"0\r\n\r\n")

    async with scripted(script) as server, pool(urls=[server.url]) as it:
        assert await post(it, it.url, "/v1/messages", {"model": "sim", "stream": True}) == (200, event * 2)
