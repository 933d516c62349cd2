"""Small questions to a replica, asked of a simulated one and of servers that misbehave."""

import asyncio

import aiohttp
import orjson
import pytest
from aiohttp import web

from kvroute.adapters.replica_client import ReplicaClient
from kvroute.errors import ReplicaBroke, ReplicaTimedOut, ReplicaUnreachable
from kvroute.fake.server import build_replica, serve_replica


@pytest.fixture
async def session():
    async with aiohttp.ClientSession() as session:
        yield session


async def served(handler):
    """Serve one handler on every path; return runner and URL."""
    runner = web.ServerRunner(web.Server(handler))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def test_simulated_replica(session):
    """Health, cards, metrics and tokens of a replica are read."""
    runner, url = await serve_replica(build_replica(model="m", kv_tokens=4096, block_size=32))
    client = ReplicaClient(session, url, None, 5.0)
    try:
        assert await client.ailment() == ""
        (card,) = await client.cards()
        assert (card.name, card.parent) == ("m", None)
        (report,) = (await client.page(1.0)).engines
        assert (report.block_size, report.capacity_tokens) == (32, 4096)
        answer = orjson.loads(await client.ask("/tokenize", b'{"prompt": "hello"}'))
        assert answer["count"] == len(answer["tokens"])
        with pytest.raises(ReplicaBroke, match="400"):
            await client.ask("/tokenize", b"{")
    finally:
        await runner.cleanup()


async def test_nobody_there(session):
    """A port without a listener is unreachable, and not healthy."""
    client = ReplicaClient(session, "http://127.0.0.1:9", None, 5.0)
    assert "/health" in await client.ailment()
    with pytest.raises(ReplicaUnreachable):
        await client.cards()


async def test_silent(session):
    """A server that takes the question and says nothing times out."""

    async def handler(_request):
        await asyncio.sleep(1)
        return web.Response()

    runner, url = await served(handler)
    try:
        with pytest.raises(ReplicaTimedOut):
            await ReplicaClient(session, url, None, 0.05).page(0.0)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"data": [{"name": "x"}]}', b""])
async def test_other_server(session, body):
    """What is no list of models is refused as such."""

    async def handler(_request):
        return web.Response(body=body)

    runner, url = await served(handler)
    try:
        with pytest.raises(ReplicaBroke, match="/v1/models"):
            await ReplicaClient(session, url, None, 5.0).cards()
    finally:
        await runner.cleanup()


async def test_key_and_redirect(session):
    """The replica's key goes with every question, and a redirect is not followed with it."""
    seen = []

    async def handler(request):
        seen.append(request.headers.get("Authorization"))
        return web.Response(status=307, headers={"Location": "http://127.0.0.1:9/elsewhere"})

    runner, url = await served(handler)
    try:
        with pytest.raises(ReplicaBroke, match="307"):
            await ReplicaClient(session, url, "k3y", 5.0).cards()
        assert seen == ["Bearer k3y"]
    finally:
        await runner.cleanup()
