"""A simulated replica behind vLLM's HTTP and ZeroMQ surface.

Routes, bodies, statuses and errors are those of a vLLM server; the engine behind them is `sim.SimReplica`, run in real
time. What it says is invented, what it caches, queues and counts is not.

`build_replica` makes the application and starts nothing; `serve_replica` serves it; `run_replica` is the command.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable

from aiohttp import web

from kvroute.errors import ConfigError, KvrouteError
from kvroute.fake import openai
from kvroute.fake.driver import Driver
from kvroute.fake.events import EventFeed
from kvroute.fake.handlers import Replica, json_response
from kvroute.fake.publisher import EventPublisher, PublisherConfig
from kvroute.fake.requests import Model
from kvroute.kv.pool import BlockPool
from kvroute.sim.engine import DEFAULT_GPU, DEFAULT_MODEL, default_time
from kvroute.sim.presets import GIB, offload_of
from kvroute.sim.replica import Offload, SimReplica
from kvroute.sizing.capacity import ONE_GPU
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset

BODY_LIMIT_BYTES = 64 * 1024 * 1024
BLOCKS_MAX = 1 << 24  # of a cache; some 150 bytes each
KEEP_ALIVE_S = 5.0  # vLLM closes idle connections after this
SHUTDOWN_S = 5.0  # that streams have for their last event after SIGTERM
DYING_S = 0.3  # that the server of a real vLLM outlives its engine: green probes, failing requests
REPLICA = web.AppKey("replica", Replica)
DEFAULT_KV_TOKENS = 131_072
DEFAULT_MODEL_LEN = 32_768

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Write failures as vLLM does: OpenAI's shape for its own, FastAPI's for routes and methods."""
    try:
        return await handler(request)
    except KvrouteError as failure:
        return json_response(openai.error(failure), failure.status)
    except web.HTTPException as failure:
        response = json_response({"detail": failure.reason}, failure.status)
        if isinstance(failure, web.HTTPMethodNotAllowed):
            response.headers["Allow"] = ", ".join(sorted(failure.allowed_methods))
        return response


async def _name_request(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = request.headers.get("X-Request-Id") or uuid.uuid4().hex


def build_replica(
    *,
    model: str = "sim",
    kv_tokens: int = DEFAULT_KV_TOKENS,
    block_size: int = 16,
    speed: float = 1.0,
    max_model_len: int | None = None,
    seed: int = 0,
    faults: bool = False,
    events: PublisherConfig | None = None,
    kv_offloading_size: float = 0.0,
) -> web.Application:
    """Make a simulated replica whose KV cache has `kv_tokens` tokens of blocks, one of which is never usable.

    `speed` divides the time of every step. `seed` changes what it says. `max_model_len` is the context length, by
    default what fits in the cache, at most 32,768. `faults` opens POST /_fault. `events` says where KV events are
    published; without it there are none. `kv_offloading_size` is the CPU memory behind the cache, in GiB, with blocks
    as large as those of the model whose speed it has.
    """
    _check(kv_tokens, block_size, speed)
    pool = BlockPool(kv_tokens // block_size, block_size)
    context = min(DEFAULT_MODEL_LEN, pool.usable_blocks * block_size) if max_model_len is None else max_model_len
    if not 1 < context <= kv_tokens:
        raise ConfigError(f"max_model_len must be between 2 and kv_tokens ({kv_tokens}), got {context}")
    feed = None if events is None else EventFeed(EventPublisher(events), block_size)
    offload = _offload(kv_offloading_size, block_size, speed) if kv_offloading_size else None
    driver = Driver(SimReplica(pool, time=default_time(speed), offload=offload), feed, max_model_len=context)
    replica = Replica(driver, Model(model, context), seed)
    app = web.Application(client_max_size=BODY_LIMIT_BYTES, middlewares=[_errors])
    app[REPLICA] = replica
    app.add_routes(replica.routes(with_faults=faults))
    app.on_response_prepare.append(_name_request)

    async def engine(_app: web.Application) -> AsyncIterator[None]:
        if feed is not None:
            feed.publisher.start()
        await driver.start()
        yield
        await driver.close()
        if feed is not None:
            feed.publisher.close()

    async def stop(_app: web.Application) -> None:
        driver.abort_all()

    app.cleanup_ctx.append(engine)
    app.on_shutdown.append(stop)
    return app


def _offload(size_gib: float, block_size: int, speed: float) -> Offload:
    """Return the CPU memory of the engine whose step times are the default."""
    one = offload_of(preset(DEFAULT_MODEL), gpu(DEFAULT_GPU), ONE_GPU, block_size, int(size_gib * GIB))
    if one.num_blocks > BLOCKS_MAX:
        raise ConfigError(f"kv_offloading_size must be at most {BLOCKS_MAX} blocks, got {one.num_blocks}")
    return Offload(one.num_blocks, round(one.block_copy_fs / speed))


def _check(kv_tokens: int, block_size: int, speed: float) -> None:
    if block_size < 1:
        raise ConfigError(f"block_size must be at least 1, got {block_size}")
    if kv_tokens < 2 * block_size:
        raise ConfigError(f"kv_tokens must be at least two blocks ({2 * block_size} tokens), got {kv_tokens}")
    if kv_tokens // block_size > BLOCKS_MAX:
        raise ConfigError(f"kv_tokens must be at most {BLOCKS_MAX} blocks ({BLOCKS_MAX * block_size}), got {kv_tokens}")
    if not speed > 0:
        raise ConfigError(f"speed must be greater than 0, got {speed}")


async def serve_replica(app: web.Application, host: str = "127.0.0.1", port: int = 0) -> tuple[web.AppRunner, str]:
    """Serve a replica and return its runner, to be cleaned up by the caller, and its URL. Port 0 takes a free one."""
    runner = web.AppRunner(
        app,
        access_log=None,
        auto_decompress=False,  # nor does vLLM's server: Content-Encoding means nothing to it
        handler_cancellation=True,  # a client that leaves ends its request
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    address = runner.addresses[0]
    return runner, f"http://[{host}]:{address[1]}" if ":" in host else f"http://{host}:{address[1]}"


async def run_replica(
    host: str,
    port: int,
    model: str,
    kv_tokens: int,
    block_size: int,
    speed: float,
    *,
    faults: bool = False,
    kv_events: str | None = None,
    kv_events_replay: str | None = None,
    kv_events_topic: str = "",
    kv_offloading_size: float = 0.0,
    shutdown_timeout: float = 0.0,
) -> None:
    """Serve a replica until SIGTERM or SIGINT, and say where in one line.

    Raises:
        ConfigError: a setting cannot work, or an address cannot be used.
    """
    if kv_events is None and kv_events_replay is not None:
        raise ConfigError("kv_events_replay: needs --kv-events, too")
    events = kv_events and PublisherConfig(endpoint=kv_events, replay_endpoint=kv_events_replay, topic=kv_events_topic)
    app = build_replica(
        model=model,
        kv_tokens=kv_tokens,
        block_size=block_size,
        speed=speed,
        faults=faults,
        events=events or None,
        kv_offloading_size=kv_offloading_size,
    )
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for name in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(name, stopped.set)
    try:
        runner, url = await serve_replica(app, host, port)
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error.strerror or error
        raise ConfigError(
            f"port: cannot listen on {host}:{port}: {reason}; choose another, or 0 for any free one"
        ) from None
    try:
        print(f"kvroute replica {model} serving on {url}", flush=True)
        await stopped.wait()
        await _wind_down(app[REPLICA], shutdown_timeout)
    finally:
        await runner.cleanup()


async def _wind_down(replica: Replica, timeout_s: float) -> None:
    """Stop as vLLM does on SIGTERM, with its --shutdown-timeout.

    0: what is under way ends with "abort", and for a moment new requests fail while probes stay green. Otherwise what
    is under way may end within that time, and new requests are answered with an empty text and "abort".
    """
    if timeout_s <= 0:
        replica.is_dying = True
        replica.driver.abort_all()
        await asyncio.sleep(DYING_S)
        return
    replica.driver.is_stopping = True
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout_s):
            await replica.driver.drained()
