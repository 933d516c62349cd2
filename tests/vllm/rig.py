"""A router in this process before one real engine, with a Redis: prompts of known tokens, and what the index says."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import redis

from kvroute.config import load
from kvroute.kv.chain import chain_of, root_of, tokens_of
from kvroute.proxy.app import Service
from tests.admin import fetch
from tests.observer import Observer, cells_in, cells_of, replayed
from tests.processes import Valkey, free_port
from tests.vllm.engines import SERVED_NAME, Engines

BLOCK = 32
POOL_BLOCKS = 72  # small, so that nearly every request evicts
SMALL = ("--num-gpu-blocks-override", str(POOL_BLOCKS), "--max-model-len", "1024")
CLIENTS = 8
KEPT_S = 2.0  # connections: engines close theirs after 5 s, and a request that meets that fails
SALTS = (None, None, None, "tenant-a", "tenant-b")


class Rig:
    """What a test of the index needs. `ranks`: how many data-parallel ranks the engine has."""

    def __init__(
        self, engines: Engines, valkey: Valkey, service: Service, session: aiohttp.ClientSession, ranks: int = 1
    ) -> None:
        self.engines, self.service, self.session = engines, service, session
        self.store = redis.Redis(port=valkey.port)
        self.rng = random.Random(4)
        url, port = engines.urls[0], engines.engines[0].replay_port
        self.markers = 0
        self.replay_ports = {url: port} if ranks == 1 else {f"{url}#{rank}": port + rank for rank in range(ranks)}

    async def complete(
        self, ids: list[int], salt: str | None = None, tokens: int = 1, *, model: str = SERVED_NAME, url: str = ""
    ) -> tuple[int, int]:
        """Send a prompt through the router, or to `url`; return the tokens that were predicted and those that were
        delivered from the cache."""
        body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": tokens, "ignore_eos": True}
        body |= {"cache_salt": salt} if salt else {}
        async with self.session.post(f"{url or self.service.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
            predicted = int(answer.headers.get("x-kvroute-predicted-tokens", 0))
            return predicted, usage["prompt_tokens_details"]["cached_tokens"]

    def prompt(self) -> tuple[list[int], str | None]:
        """One of 40 prompts: eight beginnings, each with some ends, of two to sixteen blocks."""
        which = self.rng.randrange(40)
        shape = random.Random(which % 8)
        begin = [shape.randrange(1000, 4000) for _ in range(BLOCK * shape.randrange(1, 6))]
        shape = random.Random(100 + which)
        end = [shape.randrange(1000, 4000) for _ in range(shape.randrange(BLOCK, 11 * BLOCK))]
        return begin + end, SALTS[which % len(SALTS)]

    async def load(self, requests: int, url: str = "") -> None:
        """Have the clients send mixed requests, through the router or to `url`."""
        left = iter(range(requests))

        async def client() -> None:
            for _ in left:
                ids, salt = self.prompt()
                await self.complete(ids, salt, self.rng.randrange(1, 3 * BLOCK), url=url)

        await asyncio.gather(*[client() for _ in range(CLIENTS)])

    def observer(self, replica: str = "") -> Observer:
        """Read all that a replica still tells, the first one's unless it is named."""
        port = self.replay_ports[replica or next(iter(self.replay_ports))]
        return Observer(SERVED_NAME).see(replayed(port))

    async def agrees(self, replica: str = "") -> Observer:
        """Wait until the index is at rest, then demand that it holds what the replica's full replay says."""
        replica = replica or next(iter(self.replay_ports))
        deadline = time.monotonic() + 20
        while True:
            observer = await asyncio.to_thread(self.observer, replica)
            expected = cells_of(observer.chains())
            found = await asyncio.to_thread(cells_in, self.store, replica)
            if found == expected:
                return observer
            assert time.monotonic() < deadline, (len(found - expected), len(expected - found), len(expected))
            await asyncio.sleep(0.2)

    async def wrong(self, count: int) -> list[tuple[int, int, int]]:
        """Return those of sequential probes whose prediction is not what was delivered, with the prompt's length."""
        found = []
        await self.heard()
        await self.trusted()
        for _ in range(count):
            await self.overtaken()
            ids, salt = self.prompt()
            predicted, delivered = await self.complete(ids, salt)
            if predicted != delivered:
                found.append((predicted, delivered, len(ids)))
        return found

    async def trusted(self) -> None:
        """Have deliveries restore the trust in every replica, so that predictions are what the index says.

        Clients that together need more than the pool evict each other's blocks between prediction and admission, which
        may cost a replica that trust.
        """
        for replica in self.replay_ports:
            async with asyncio.timeout(60):
                while (await self.events(replica))["distrusted"]:
                    await self.overtaken()
                    ids, salt = self.prompt()
                    await self.complete(ids, salt)

    async def overtaken(self) -> None:
        """Wait until all that the engine has done is in the index: until a prompt is that the engine was given last.

        How far the events are behind an answer, on a machine under load, no pause can tell.
        """
        for rank, replica in enumerate(self.replay_ports):
            self.markers += 1
            ids = [4000 + self.markers % 1000, self.markers // 1000, *range(4001, 4000 + BLOCK)]  # a block, and a token
            body = {"model": SERVED_NAME, "prompt": ids, "max_tokens": 1}
            headers = {"X-data-parallel-rank": str(rank)} if len(self.replay_ports) > 1 else {}
            url = f"{self.engines.urls[0]}/v1/completions"
            async with self.session.post(url, json=body, headers=headers) as answer:
                assert answer.status == 200, await answer.text()
            marker = cells_of({chain_of(tokens_of(ids), BLOCK, root_of(SERVED_NAME))})
            async with asyncio.timeout(20):
                while not marker <= await asyncio.to_thread(cells_in, self.store, replica):
                    await asyncio.sleep(0.02)

    async def heard(self) -> None:
        """Wait until the router has taken in all that the engine has told, and believes it."""
        await asyncio.sleep(0.15)  # the events of a step follow its answer
        for replica, port in self.replay_ports.items():
            async with asyncio.timeout(20):
                while True:
                    row = await self.events(replica)
                    told = await asyncio.to_thread(replayed, port, row["sequence"] or 0)
                    if row["events"] == "exact" and (not told or told[-1][0] == row["sequence"]):
                        break
                    await asyncio.sleep(0.05)

    async def events(self, replica: str = "") -> dict[str, Any]:
        """Return what the router's admin says of a replica's events."""
        rows = json.loads(await asyncio.to_thread(fetch, f"{self.service.admin_url}/admin/index"))["replicas"]
        replica = replica or next(iter(self.replay_ports))
        return next(row for row in rows if row["replica"] == replica)


def new_session() -> aiohttp.ClientSession:
    """Make a session that keeps no connection for as long as an engine might close it."""
    timeout = aiohttp.ClientTimeout(total=120)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(keepalive_timeout=KEPT_S))


@asynccontextmanager
async def routed(engines: Engines, valkey: Valkey, *, ranks: int = 1, **settings: Any) -> AsyncIterator[Rig]:
    """Start a router before the engine; `settings` as in the settings file, with "__" for a point."""
    tree = {
        "listen.port": 0, "admin.port": 0, "replicas": [{"url": engines.urls[0]}], "proxy.log_requests": False,
        "store.url": f"redis://127.0.0.1:{valkey.port}", "proxy.expose_prediction": True, "drain_timeout_s": 2.0,
        "store.lookup_deadline_ms": 1000.0,  # a machine under load must not turn an answer into a local one
        **{name.replace("__", "."): value for name, value in settings.items()},
    }  # fmt: skip
    service = Service(load(None, {}, tree))
    await service.start()
    try:
        async with new_session() as session:
            yield Rig(engines, valkey, service, session, ranks)
    finally:
        await service.stop()


def revive(engines: Engines, *flags: str) -> None:
    """Kill the only engine at once, and start another one on its ports."""
    (engine,) = engines.engines
    engines.kill(0)
    engines.children.pop(engine.pid).wait(30)
    engines.engines = []
    engines.start([(engine.port, engine.events_port, engine.replay_port)], *flags)


def free_pair() -> int:
    """Return a free port whose next one is free too: ranks count theirs up."""
    while True:
        port = free_port()
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
