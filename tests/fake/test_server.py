"""A simulated replica as a service: settings, connections, signals."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys

import aiohttp
import pytest

from kvroute.errors import ConfigError
from kvroute.fake.server import build_replica

RUN = """
import asyncio
from kvroute.fake.server import run_replica
asyncio.run(run_replica("127.0.0.1", 0, "sim", 32768, 16, {speed}, faults=True))
"""


@pytest.fixture
async def process():
    """A replica in a process of its own, at a pace that leaves time to interfere, and its URL."""
    found = await asyncio.create_subprocess_exec(
        sys.executable, "-c", RUN.format(speed=0.5), stdout=asyncio.subprocess.PIPE
    )
    line = (await found.stdout.readline()).decode()
    yield found, re.search(r"http://\S+", line)[0]
    if found.returncode is None:
        found.kill()
    await found.communicate()


async def streamed(url, body, then):
    """Begin a stream, call `then`, and read the rest."""
    async with aiohttp.ClientSession(url) as session, session.post("/v1/completions", json=body) as response:
        await response.content.readline()
        await then(session)
        return (await response.read()).decode()


BODY = {"prompt": "Hello there", "max_tokens": 2000, "ignore_eos": True, "stream": True}


async def test_sigterm_ends_streams_with_abort_and_the_process(process):
    """A stream under way ends in order, with finish_reason "abort" and the end mark; then the process is gone."""
    replica, url = process

    async def stop(_session):
        replica.send_signal(signal.SIGTERM)

    *_, last, done = (await streamed(url, BODY, stop)).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "abort"
    assert (done, await replica.wait()) == ("data: [DONE]", 0)


async def test_a_crash_takes_the_streams_with_it(process):
    """The process dies at once; who reads a stream sees the connection break."""
    replica, url = process

    async def crash(session):
        with pytest.raises(aiohttp.ClientError):
            await session.post("/_fault", json={"kind": "crash"})

    with pytest.raises(aiohttp.ClientError):
        await streamed(url, BODY, crash)
    assert await replica.wait() == 1


@pytest.mark.slow
async def test_idle_connections_are_closed_by_the_replica(process):
    """A kept-alive connection that nobody uses is closed from the replica's side, which goes on serving others."""
    _, url = process
    reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rsplit(":", 1)[1]))
    writer.write(b"GET /health HTTP/1.1\r\nHost: replica\r\n\r\n")
    assert (await reader.readline()).startswith(b"HTTP/1.1 200")
    async with asyncio.timeout(60):
        await reader.read()
    writer.close()
    await writer.wait_closed()
    async with aiohttp.ClientSession(url) as session, session.get("/health") as response:
        assert response.status == 200


async def test_headers_go_out_before_the_first_token(serve):
    """A stream's status is there at once, while the engine still computes the prompt."""
    session = await serve(faults=True)
    await session.post("/_fault", json={"kind": "hang"})
    async with session.post("/v1/completions", json=BODY) as response:
        assert response.status == 200


async def test_the_context_is_what_fits_in_the_cache(serve):
    """Without a setting, the longest context is the usable cache, up to 32,768 tokens."""
    for kv_tokens, expected in ((1600, 1584), (100_000, 32_768)):
        session = await serve(kv_tokens=kv_tokens)
        async with session.get("/v1/models") as response:
            assert (await response.json())["data"][0]["max_model_len"] == expected


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"kv_tokens": 31}, "kv_tokens"),
        ({"speed": 0}, "speed"),
        ({"kv_tokens": 1600, "max_model_len": 1601}, "max_model_len"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, named):
    """The error names the setting and what it may be."""
    with pytest.raises(ConfigError, match=f"{named} must be"):
        build_replica(**settings)
