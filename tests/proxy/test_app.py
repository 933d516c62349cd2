"""The whole router: from settings to answers, and its watchers against replicas that come, go and come back."""

import asyncio
import socket

import pytest
from aiohttp import web

from kvroute.adapters.sized import sized
from kvroute.errors import ConfigError
from kvroute.fake.server import build_replica, serve_replica
from kvroute.proxy.app import Service
from tests.proxy.pool import running_pool, settings

WAIT_S = 5.0


async def until(condition):
    """Wait until a condition holds, for a bounded time."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0.01)


async def test_answers_and_prefers_the_warm_replica():
    """A conversation that grows stays on the replica that holds it, and its prefix is delivered from the cache."""
    async with running_pool(2, proxy__expose_prediction=True) as pool:
        long = "the quick brown fox jumps over the lazy dog " * 40
        first = await pool.chat(long)
        second = await pool.chat(long)
        cached = second["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert cached > 0.8 * second["usage"]["prompt_tokens"]


async def test_replica_leaves_and_comes_back():
    """A replica that stops is taken out by its probes, and used again when it is back on its port."""
    async with running_pool(2) as pool:
        runner, url = pool.replicas[0]
        port = int(url.rpartition(":")[2])
        await runner.cleanup()
        await until(lambda: not pool.service.fleet.states()[0].is_healthy)
        assert (await pool.chat("still served"))["choices"]
        pool.replicas[0] = await serve_replica(build_replica(speed=100.0, kv_tokens=8192), port=port)
        await until(lambda: pool.service.fleet.states()[0].is_available)


async def test_starts_before_its_replicas():
    """A router that starts first waits for its replicas and then serves them."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    service = Service(settings([f"http://127.0.0.1:{port}"]))
    await service.start()
    runner = None
    try:
        assert service.fleet.states() == ()
        runner, _ = await serve_replica(build_replica(speed=100.0), port=port)
        await until(lambda: any(state.is_available for state in service.fleet.states()))
    finally:
        await service.stop()
        if runner:
            await runner.cleanup()


async def test_port_in_use():
    """A port that is taken is named, with the remedy, and nothing is left open."""
    async with running_pool(1) as pool:
        port = int(pool.service.url.rpartition(":")[2])
        with pytest.raises(ConfigError, match=r"`listen`: cannot listen on 127\.0\.0\.1.*listen\.port"):
            await Service(settings(pool.urls, listen__port=port)).start()


async def test_stop_lets_requests_end():
    """A request that is under way when the router stops still gets its answer."""
    async with running_pool(1) as pool:
        asking = asyncio.create_task(pool.chat("a last one", max_tokens=200))
        await until(lambda: pool.service.stats.active == 1)
        await pool.service.stop()
        assert (await asking)["usage"]["completion_tokens"] == 200


async def test_replica_without_its_model_is_reported_and_harmless():
    """A URL that is no vLLM server is left out, and the others serve."""
    async with running_pool(2) as pool:
        other = Service(settings([pool.urls[0], pool.service.admin_url]))
        await other.start()
        try:
            assert [state.replica.url for state in other.fleet.states()] == [pool.urls[0]]
        finally:
            await other.stop()


async def test_size_stands_in_for_what_a_replica_does_not_say():
    """With a GPU named, a model of known shape starts with rates of its own size instead of the general seed."""
    runner, url = await serve_replica(build_replica(model="Qwen/Qwen3-32B", speed=100.0))
    service = Service(settings([url], hardware__gpu="h100", hardware__tensor_parallel=2))
    await service.start()
    try:
        (state,) = service.fleet.states()
        assert state.rates == sized(None, "Qwen/Qwen3-32B", "h100", 2).rates
    finally:
        await service.stop()
        await runner.cleanup()


async def test_capacity_of_a_replica_that_does_not_report_it():
    """An engine without vLLM's metrics holds what its weights leave of the GPU; without a GPU it is unknown."""

    async def models(request):
        return web.json_response({"object": "list", "data": [{"id": "Qwen/Qwen3-32B", "object": "model"}]})

    async def nothing(request):
        return web.Response()

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/health", nothing), web.get("/metrics", nothing)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    expected = sized(None, "Qwen/Qwen3-32B", "h100", 2).capacity_tokens
    for hardware, tokens in (({"hardware__gpu": "h100", "hardware__tensor_parallel": 2}, expected), ({}, None)):
        service = Service(settings([url], **hardware))
        await service.start()
        try:
            (state,) = service.fleet.states()
            assert state.replica.capacity_tokens == tokens
        finally:
            await service.stop()
    await runner.cleanup()


async def test_unknown_gpu_stops_the_start():
    """A GPU that nobody knows is refused at once, with the known names."""
    with pytest.raises(ConfigError, match="h200"):
        await Service(settings(["http://127.0.0.1:9"], hardware__gpu="h2000")).start()


async def test_restarted_replica_holds_nothing():
    """After a restart on the same port nothing of the old life is predicted."""
    async with running_pool(1, proxy__expose_prediction=True) as pool:
        runner, url = pool.replicas[0]
        text = "all of this was computed before " * 40
        for _ in range(2):
            answer = await pool.chat(text)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        await runner.cleanup()
        port = int(url.rpartition(":")[2])
        pool.replicas[0] = await serve_replica(build_replica(speed=100.0, kv_tokens=8192), port=port)
        (_, before) = await pool.admin("/metrics")
        assert "kvroute_feeds_restarts_total 0.0" in before
        async with asyncio.timeout(WAIT_S):
            while "kvroute_feeds_restarts_total 1.0" not in (await pool.admin("/metrics"))[1]:
                await asyncio.sleep(0.02)
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4}
        async with pool.http.post(pool.service.url + "/v1/chat/completions", json=body) as reply:
            assert reply.headers["x-kvroute-predicted-tokens"] == "0"
            assert (await reply.json())["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_tokenizer_that_is_not_there_stops_the_start():
    """A named directory without a tokenizer is refused before anything listens."""
    with pytest.raises(ConfigError, match="tokenizer: /nowhere holds no"):
        await Service(settings(["http://127.0.0.1:9"], tokenizer="/nowhere")).start()


async def test_an_unknown_gpu_stops_the_start_by_name():
    """The setting is named, and the choices are those that it has."""
    service = Service(settings(["http://127.0.0.1:9"], hardware__gpu="abacus"))
    with pytest.raises(ConfigError, match=r"^`hardware\.gpu`: no GPU is named 'abacus'; known are h100, "):
        await service.start()
