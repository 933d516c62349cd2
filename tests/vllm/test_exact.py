"""The index against a real engine with a small cache: hash for hash what the engine itself tells, and so are hits."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from kvroute.config import load
from kvroute.proxy.app import Service
from tests.observer import Observer, cells_in, cells_of, replayed
from tests.processes import Valkey, free_port
from tests.vllm.engines import SERVED_NAME, Engines

BLOCK = 32
POOL_BLOCKS = 72  # small, so that nearly every request evicts
SMALL = ("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "1024")
CLIENTS, REQUESTS, REMOVALS_MIN = 8, 500, 2_000
SALTS = (None, None, None, "tenant-a", "tenant-b")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engines]:
    """One engine with a small pool."""
    with Engines(model_dir, tmp_path_factory.mktemp("small")) as engines:
        yield engines.start([(free_port(), free_port(), free_port())], *SMALL)


class Rig:
    """A router in this process before the engine, with its store."""

    def __init__(self, engines: Engines, valkey: Valkey, service: Service, session: aiohttp.ClientSession) -> None:
        self.engines, self.service, self.session = engines, service, session
        self.store = redis.Redis(port=valkey.port)
        self.rng = random.Random(4)

    async def complete(self, ids: list[int], salt: str | None = None, tokens: int = 1) -> tuple[int, int]:
        """Send a prompt; return the tokens that were predicted and those that were delivered from the cache."""
        body: dict[str, Any] = {"model": SERVED_NAME, "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        body |= {"cache_salt": salt} if salt else {}
        async with self.session.post(f"{self.service.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
            return int(answer.headers["x-kvroute-predicted-tokens"]), usage["prompt_tokens_details"]["cached_tokens"]

    def prompt(self) -> tuple[list[int], str | None]:
        """One of 40 prompts: eight beginnings, each with some ends, of two to sixteen blocks."""
        which = self.rng.randrange(40)
        shape = random.Random(which % 8)
        begin = [shape.randrange(1000, 4000) for _ in range(BLOCK * shape.randrange(1, 6))]
        shape = random.Random(100 + which)
        end = [shape.randrange(1000, 4000) for _ in range(shape.randrange(BLOCK, 11 * BLOCK))]
        return begin + end, SALTS[which % len(SALTS)]

    async def load(self, requests: int) -> None:
        """Have the clients send mixed requests."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                ids, salt = self.prompt()
                await self.complete(ids, salt, self.rng.randrange(1, 3 * BLOCK))

        await asyncio.gather(*[client() for _ in range(CLIENTS)])

    def observer(self) -> Observer:
        return Observer(SERVED_NAME).see(replayed(self.engines.engines[0].replay_port))

    async def agrees(self) -> Observer:
        """Wait until the index is at rest, then demand that it holds what the engine's full replay says."""
        deadline = time.monotonic() + 20
        while True:
            observer = await asyncio.to_thread(self.observer)
            expected = cells_of(observer.chains())
            found = await asyncio.to_thread(cells_in, self.store, self.engines.urls[0])
            if found == expected:
                return observer
            assert time.monotonic() < deadline, (len(found - expected), len(expected - found), len(expected))
            await asyncio.sleep(0.2)

    async def wrong(self, count: int) -> list[tuple[int, int, int]]:
        """Return those of sequential probes whose prediction is not what was delivered, with the prompt's length."""
        found = []
        for _ in range(count):
            ids, salt = self.prompt()
            predicted, delivered = await self.complete(ids, salt)
            if predicted != delivered:
                found.append((predicted, delivered, len(ids)))
            await asyncio.sleep(0.15)  # the events of a step follow its answer
        return found


@pytest.fixture
async def rig(small: Engines, tmp_path: Path):
    with Valkey(tmp_path / "valkey.log") as valkey:
        tree = {
            "listen.port": 0, "admin.port": 0, "replicas": [{"url": small.urls[0]}], "proxy.log_requests": False,
            "store.url": f"redis://127.0.0.1:{valkey.port}", "proxy.expose_prediction": True, "drain_timeout_s": 2.0,
            "store.lookup_deadline_ms": 1000.0,  # a machine under load must not turn an answer into a local one
        }  # fmt: skip
        service = Service(load(None, {}, tree))
        await service.start()
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120)) as session:
                yield Rig(small, valkey, service, session)
        finally:
            await service.stop()


def revive(engines: Engines) -> None:
    """Kill the engine at once, and start another one on its ports."""
    (engine,) = engines.engines
    engines.kill(0)
    engines.children.pop(engine.pid).wait(30)
    engines.engines = []
    engines.start([(engine.port, engine.events_port, engine.replay_port)], *SMALL)


async def reset(rig: Rig) -> bool:
    async with rig.session.post(f"{rig.engines.urls[0]}/reset_prefix_cache") as answer:
        return answer.status == 200 and (await answer.json()).get("success") is not False


async def test_the_index_holds_what_the_engine_holds(rig):
    """Under load that evicts thousands of blocks, and salts: at rest the index is the engine's cache, hash for hash;
    then nearly every prediction is what is delivered; and no tenant is predicted another's blocks."""
    await rig.load(REQUESTS)
    observer = await rig.agrees()
    assert observer.removals >= REMOVALS_MIN
    wrong = await rig.wrong(100)
    assert len(wrong) <= 1, wrong
    ids = [random.Random(9).randrange(1000, 4000) for _ in range(4 * BLOCK + 1)]
    await rig.complete(ids, "tenant-a")
    await asyncio.sleep(0.1)
    seen = [await rig.complete(ids, salt) for salt in ("tenant-b", None, "tenant-a")]
    assert seen == [(0, 0), (0, 0), (4 * BLOCK, 4 * BLOCK)]
    await rig.agrees()


async def test_after_resets_and_an_emptied_store(rig):
    """A reset of an idle and of a busy engine, and a Redis that lost everything, leave the index exact."""
    await rig.load(40)
    await rig.agrees()
    assert await reset(rig)
    await rig.load(8)
    await rig.agrees()
    busy = asyncio.ensure_future(rig.load(60))
    while not busy.done():
        await reset(rig)
        await asyncio.sleep(0.3)
    await busy
    await rig.agrees()
    rig.store.flushall()
    await rig.agrees()
    assert await rig.wrong(30) == []


async def test_a_warm_engine_is_learnt_by_a_new_router(rig):
    """A router that starts before a warm engine holds what the engine holds, before any request."""
    await rig.agrees()
    assert (await asyncio.to_thread(rig.observer)).chains()


async def test_a_killed_engine_begins_anew(rig):
    """An engine that is killed and started again on its ports is empty, and followed as before."""
    await rig.load(40)
    await rig.agrees()
    engine = rig.engines.engines[0]
    await asyncio.to_thread(revive, rig.engines)
    assert rig.engines.engines[0].port == engine.port
    await rig.load(60)
    await rig.agrees()
    assert await rig.wrong(30) == []
