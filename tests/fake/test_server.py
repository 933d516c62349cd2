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
asyncio.run(run_replica("127.0.0.1", 0, "sim", 32768, 16, {speed}, faults=True{more}))
"""


@pytest.fixture
async def process(request):
    """A replica in a process of its own, at a pace that leaves time to interfere, and its URL."""
    code = RUN.format(speed=0.5, more=getattr(request, "param", ""))
    found = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
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


async def test_after_sigterm_probes_are_green_for_a_moment_and_new_requests_fail(process):
    """As at vLLM, whose server outlives its engine a little."""
    replica, url = process
    async with aiohttp.ClientSession(url) as session:
        replica.send_signal(signal.SIGTERM)
        body, status = {"prompt": "a", "max_tokens": 1}, 200
        while status == 200:  # until the signal has arrived
            async with session.post("/v1/completions", json=body) as response:
                status, answer = response.status, await response.json()
        assert (status, answer["error"]["type"]) == (500, "InternalServerError")
        async with session.get("/health") as response:
            assert response.status == 200
    assert await replica.wait() == 0


@pytest.mark.parametrize("process", [", shutdown_timeout=60.0"], indirect=True)
async def test_with_a_shutdown_timeout_streams_run_to_their_end(process):
    """New requests are answered with an empty text and "abort"; then the process ends, before the time is up."""
    replica, url = process
    body = BODY | {"max_tokens": 150}

    async def stop(session):
        replica.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.1)
        async with session.post("/v1/completions", json=body | {"stream": False}) as response:
            choice = (await response.json())["choices"][0]
        assert (response.status, choice["text"], choice["finish_reason"]) == (200, "", "abort")

    *_, last, done = (await streamed(url, body, stop)).strip().split("\n\n")
    assert json.loads(last.removeprefix("data: "))["choices"][0]["finish_reason"] == "length"
    assert (done, await replica.wait()) == ("data: [DONE]", 0)


@pytest.mark.parametrize("process", [", shutdown_timeout=0.3"], indirect=True)
async def test_a_shutdown_timeout_that_is_over_aborts(process):
    """Whatever still runs."""
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


async def test_what_the_cache_lost_comes_back_from_cpu_memory(serve):
    """Two prompts that do not fit together hit each time they return, and metrics tell that it was from outside."""
    session = await serve(kv_tokens=1024, kv_offloading_size=0.25)
    for number in range(4):
        body = {"prompt": [5 + number % 2] * 900, "max_tokens": 2}
        async with session.post("/v1/completions", json=body) as response:
            usage = (await response.json())["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == (0 if number < 2 else 896)
    async with session.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    counts = {line.split("{")[0]: float(line.split()[-1]) for line in lines if not line.startswith("#")}
    assert counts["vllm:prompt_tokens_cached_total"] == 2 * 896
    assert 0 < counts["vllm:external_prefix_cache_hits_total"] <= 2 * 896
    assert any('source="external_kv_transfer"' in line and not line.endswith(" 0.0") for line in lines)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"block_size": 0}, "block_size"),
        ({"kv_tokens": 31}, "kv_tokens"),
        ({"kv_tokens": 10**15}, "kv_tokens"),
        ({"speed": 0}, "speed"),
        ({"kv_tokens": 1600, "max_model_len": 1601}, "max_model_len"),
        ({"kv_offloading_size": 1e9}, "kv_offloading_size"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, named):
    """The error names the setting and what it may be."""
    with pytest.raises(ConfigError, match=f"{named} must be"):
        build_replica(**settings)
