"""Our event stream on a real publisher: replay, loss of the connection, reset, restart on its ports."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvroute.adapters.event_replay import ask
from kvroute.adapters.event_sources import EventSource, event_sources
from kvroute.adapters.vllm_events import EventStream
from kvroute.kv.event_sequence import Position
from tests.processes import free_port
from tests.vllm.engines import BLOCK_SIZE, SERVED_NAME, Engine, Engines

Told = list[Any]


class Log:
    """A sink that writes down batches, "new life" and gaps."""

    def __init__(self) -> None:
        self.told: Told = []

    def batch(self, seq: int, payload: bytes) -> None:
        self.told.append((seq, payload))

    def new_life(self) -> None:
        self.told.append("new life")

    def gap(self, first: int, last: int) -> None:
        self.told.append((first, last, "lost"))

    async def until(self, holds: Callable[[Told], bool]) -> None:
        async with asyncio.timeout(30):
            while not holds(self.told):
                await asyncio.sleep(0.02)


def posted(url: str, body: dict[str, Any], **headers: str) -> Any:
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def store(engine: Engine, first: int, count: int, rank: int | None = None) -> None:
    """Send `count` prompts of two whole blocks each that no other prompt shares, to a rank if one is named."""
    headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
    for number in range(first, first + count):
        prompt = [300 + number] * (2 * BLOCK_SIZE) + [7]
        posted(f"{engine.url}/v1/completions", {"model": SERVED_NAME, "prompt": prompt, "max_tokens": 1}, **headers)


def sources(engine: Engine, *, engines_dial: bool = False) -> list[EventSource]:
    with urllib.request.urlopen(f"{engine.url}/kv_event_sources", timeout=10) as answer:
        return event_sources(answer.read(), "127.0.0.1", engines_dial=engines_dial)


@asynccontextmanager
async def streaming(
    engine: Engine, sink: Log, position: Position | None = None, *, rank: int = 0, engines_dial: bool = False
) -> AsyncIterator[EventStream]:
    """The stream of an engine, found by asking it where it publishes."""
    source = sources(engine, engines_dial=engines_dial)[rank]
    stream = EventStream(
        source.endpoint,
        sink=sink,
        replay_endpoint=source.replay_endpoint,
        topic=source.topic,
        position=position,
        bind=source.is_bound,
    )
    await stream.start()
    try:
        yield stream
    finally:
        await stream.close()


async def kept(engine: Engine) -> Told:
    """What the engine's own replay says, asked for in one go."""
    found: Told = []

    def take(seq: int, payload: bytes) -> bool:
        found.append((seq, payload))
        return True

    assert await ask(zmq.Context.instance(), f"tcp://127.0.0.1:{engine.replay_port}", 0, take)
    return found


def kinds(told: Told) -> list[str]:
    return [event["type"] for entry in told if len(entry) == 2 for event in msgspec.msgpack.decode(entry[1])[1]]


@pytest.fixture(scope="module")
def alone(run_dir: Path, model_dir: Path) -> Iterator[Engines]:
    """An engine of our own, to be killed."""
    with Engines(model_dir, run_dir / "events") as engines:
        yield engines.start([(free_port(), free_port(), free_port())])


async def test_a_stream_hears_what_the_engine_keeps_and_what_follows(alone: Engines) -> None:
    """From number 0, in order, byte for byte; live batches, too."""
    (engine,) = alone.engines
    log = Log()
    await asyncio.to_thread(store, engine, 0, 5)
    async with streaming(engine, log) as stream:
        await log.until(lambda told: len(told) == 5)
        await asyncio.to_thread(store, engine, 5, 5)
        await log.until(lambda told: len(told) == 10)
        assert log.told == await kept(engine)
        assert stream.sequence_counters.gaps == stream.sequence_counters.new_lives == stream.counters.malformed == 0
        assert stream.counters.received >= 5


async def test_a_stream_that_was_cut_off_for_200_batches_misses_none(alone: Engines) -> None:
    """It goes on from its position."""
    (engine,) = alone.engines
    log, rest = Log(), Log()
    async with streaming(engine, log) as stream:
        await log.until(lambda told: bool(told))
        await asyncio.sleep(0.5)
        position = stream.position
    await asyncio.to_thread(store, engine, 100, 200)
    async with streaming(engine, rest, position):
        await log.until(lambda _: len(rest.told) >= 200)
        assert log.told + rest.told == await kept(engine)


async def test_a_reset_is_heard_with_the_next_step(alone: Engines) -> None:
    """Not before: an idle engine says nothing."""
    (engine,) = alone.engines
    log = Log()
    async with streaming(engine, log) as stream:
        await log.until(lambda _: stream.is_settled and bool(log.told))
        before = len(log.told)
        await asyncio.to_thread(alone.reset_caches)
        await asyncio.to_thread(store, engine, 400, 1)
        await log.until(lambda told: len(told) > before)
        assert kinds(log.told[before:]) == ["AllBlocksCleared", "BlockStored"]


async def test_an_engine_restarted_on_its_ports_is_a_new_life(alone: Engines) -> None:
    """Killed while we listen, and found again; killed while nobody listens, and counted past the old number."""
    (engine,) = alone.engines
    log, later = Log(), Log()
    async with streaming(engine, log) as stream:
        await log.until(lambda told: bool(told))
        await asyncio.to_thread(revive, alone)
        await asyncio.to_thread(store, alone.engines[0], 0, 3)
        await log.until(lambda told: told[-1][0] == 2 and "new life" in told)
        life = log.told.index("new life")
        assert log.told[life + 1 :] == await kept(alone.engines[0])
        assert stream.sequence_counters.new_lives == 1
        position = stream.position
    await asyncio.to_thread(revive, alone)
    await asyncio.to_thread(store, alone.engines[0], 0, 6)
    async with streaming(alone.engines[0], later, position):
        await later.until(lambda told: bool(told) and told[-1][0] == 5)
        assert later.told == ["new life", *await kept(alone.engines[0])]


def revive(engines: Engines) -> None:
    """Kill the only engine at once, and start another one on its ports."""
    (engine,) = engines.engines
    engines.kill(0)
    engines.children.pop(engine.pid).wait(30)
    engines.engines = []
    engines.start([(engine.port, engine.events_port, engine.replay_port)])


async def test_an_engine_that_dials_is_heard_where_we_bind(run_dir: Path, model_dir: Path) -> None:
    """An endpoint without a wildcard is dialled by vLLM; what it said before we listened is replayed."""
    ports = free_port(), free_port(), free_port()
    dials = {
        "enable_kv_cache_events": True,
        "endpoint": f"tcp://127.0.0.1:{ports[1]}",
        "replay_endpoint": f"tcp://*:{ports[2]}",
    }
    log = Log()
    with Engines(model_dir, run_dir / "dials") as engines:
        await asyncio.to_thread(engines.start, [ports], "--kv-events-config", json.dumps(dials))
        (engine,) = engines.engines
        await asyncio.to_thread(store, engine, 0, 3)
        async with streaming(engine, log, engines_dial=True) as stream:
            await log.until(lambda told: len(told) == 3)
            await asyncio.to_thread(store, engine, 3, 3)
            await log.until(lambda told: len(told) == 6)
            assert log.told == await kept(engine)
            assert stream.counters.received >= 3


async def test_each_rank_has_a_stream_of_its_own(run_dir: Path, model_dir: Path) -> None:
    """Two data-parallel ranks: each tells what was sent to it, and numbers from 0."""
    logs = Log(), Log()
    with Engines(model_dir, run_dir / "ranks") as engines:
        ports = [(free_port(), free_port(), free_port())]
        ranks = ("--data-parallel-size", "2", "--api-server-count", "1")
        await asyncio.to_thread(engines.start, ports, *ranks)
        (engine,) = engines.engines
        assert [source.rank for source in sources(engine)] == [0, 1]
        async with streaming(engine, logs[0], rank=0), streaming(engine, logs[1], rank=1):
            await asyncio.to_thread(store, engine, 0, 2, rank=0)
            await asyncio.to_thread(store, engine, 10, 3, rank=1)
            for log, count in zip(logs, (2, 3), strict=True):
                await log.until(lambda told, count=count: len(told) == count)
    for rank, (log, first) in enumerate(zip(logs, (0, 10), strict=True)):
        batches = [msgspec.msgpack.decode(payload) for _, payload in log.told]
        assert [seq for seq, _ in log.told] == list(range(len(batches)))
        assert [batch[1][0]["token_ids"][0] for batch in batches] == [300 + first + n for n in range(len(batches))]
        assert {batch[2] for batch in batches} == {rank}
