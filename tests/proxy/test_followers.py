"""A router before simulated replicas that publish: it predicts what they hold, whatever happens to their events."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from kvroute.adapters.index import MemoryIndex, Namespace
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.config import load
from kvroute.fake.publisher import PublisherConfig
from kvroute.fake.server import build_replica, serve_replica
from kvroute.kv.chain import chain_of, root_of, tokens_of
from kvroute.kv.prompt import Prompt
from kvroute.proxy.app import Service
from kvroute.proxy.followers import EventSettings, Followers
from kvroute.routing.replica import Replica, ReplicaId
from tests.admin import fetch
from tests.observer import Observer, cells_of, replayed
from tests.redis_servers import until

MODEL, BLOCK = "sim", 16
ANY_PORT = PublisherConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0")


class Rig:
    """A router and its replicas, and what a test asks of them."""

    def __init__(self, service: Service, urls: list[str], session: aiohttp.ClientSession) -> None:
        self.service, self.urls, self.session = service, urls, session

    async def complete(self, ids: list[int], **fields: Any) -> tuple[int, str]:
        """Send a prompt of token ids; return how many of its tokens were cached, and where."""
        body = {"model": MODEL, "prompt": ids, "max_tokens": 2, **fields}
        async with self.session.post(f"{self.service.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            usage = (await answer.json())["usage"]
            return usage["prompt_tokens_details"]["cached_tokens"], answer.headers["x-kvroute-replica"]

    async def rows(self) -> list[dict[str, Any]]:
        async with self.session.get(f"{self.service.admin_url}/admin/index") as answer:
            return (await answer.json())["replicas"]

    async def events_are(self, *states: str) -> None:
        async def agrees() -> bool:
            return [row["events"] for row in await self.rows()] == list(states)

        await until(agrees)

    async def fault(self, replica: int, kind: str, **how: Any) -> None:
        async with self.session.post(f"{self.urls[replica]}/_fault", json={"kind": kind, **how}) as answer:
            assert answer.status == 200, await answer.text()


@asynccontextmanager
async def rig(
    count: int = 1,
    *,
    events: PublisherConfig | None = ANY_PORT,
    kv_tokens: int = 8192,
    replays: bool = True,
    **settings: Any,
) -> AsyncIterator[Rig]:
    runners = []
    try:
        for _ in range(count):
            app = build_replica(
                model=MODEL, kv_tokens=kv_tokens, speed=100.0, faults=True, block_size=BLOCK, events=events
            )
            runners.append(await serve_replica(app))
        urls = [url for _, url in runners]
        tree = {
            "listen.port": 0,
            "admin.port": 0,
            "replicas": [{"url": url} for url in urls],
            "store.kind": "memory",
            "proxy.log_requests": False,
            "drain_timeout_s": 1.0,
            **settings,
        }
        if not replays:
            tree["events.endpoint"] = (await asyncio.to_thread(source, urls[0]))["endpoint"]
        service = Service(load(None, {}, tree))
        await service.start()
        try:
            async with aiohttp.ClientSession() as session:
                yield Rig(service, urls, session)
        finally:
            await service.stop()
    finally:
        for runner, _ in runners:
            await runner.cleanup()


def source(url: str) -> dict[str, Any]:
    """Return what a replica says about its publisher."""
    return json.loads(fetch(url + "/kv_event_sources"))["0"]


def prompt(number: int, blocks: int = 8) -> list[int]:
    return [1000 * number + i for i in range(BLOCK * blocks + 1)]


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_replicas_that_publish_are_followed(kind):
    """A replica that says where it publishes is followed, and what its events say is what is predicted."""
    async with rig(2, **{"store.kind": kind}) as it:
        first = await asyncio.gather(*[it.complete(prompt(number)) for number in range(20)])
        assert {cached for cached, _ in first} == {0}
        await it.events_are("exact", "exact")
        for number, (_, where) in enumerate(first):
            assert await it.complete(prompt(number)) == (8 * BLOCK, where)
        rows = await it.rows()
        assert sum(row["of_blocks"]["stored"] for row in rows) >= 20 * 8
        assert {row["gaps"] for row in rows} == {0}


@pytest.mark.parametrize(("mode", "events"), [("off", ANY_PORT), ("auto", None), ("on", None)])
async def test_others_hold_what_they_were_sent(mode, events):
    """With events off, or none to be had, a replica is routed to by what was sent there."""
    async with rig(1, events=events, **{"events.mode": mode}) as it:
        await it.complete(prompt(1))
        assert (await it.complete(prompt(1)))[0] == 8 * BLOCK
        assert [row["events"] for row in await it.rows()] == ["none"]


async def test_a_burst_of_one_prompt_finds_itself():
    """Of many requests with one prompt that come at once, each after the first on a replica is expected to hit there,
    though no event can have told yet."""
    async with rig(2, kv_tokens=400_000, **{"proxy.expose_prediction": True}) as it:
        await asyncio.gather(*[it.complete(prompt(number)) for number in range(8)])
        await it.events_are("exact", "exact")

        async def predicted() -> int:
            body = {"model": MODEL, "prompt": prompt(30, 100), "max_tokens": 2}
            async with it.session.post(f"{it.service.url}/v1/completions", json=body) as answer:
                return int(answer.headers["x-kvroute-predicted-tokens"])

        predictions = await asyncio.gather(*[predicted() for _ in range(64)])
        assert sorted(predictions)[2:] == [100 * BLOCK] * 62


async def test_lost_events_are_asked_for():
    """Batches that were lost on the way come by replay, and nothing is suspect."""
    async with rig(1) as it:
        await it.complete(prompt(1))
        await it.events_are("exact")
        await it.fault(0, "lose_events", count=3)
        for number in range(2, 8):
            await it.complete(prompt(number))

        async def caught_up() -> bool:
            (row,) = await it.rows()
            return row["blocks"].get("GPU", 0) >= 7 * 8 and row["suspects"] == row["gaps"] == 0

        await until(caught_up)


async def test_each_rank_is_followed_where_it_publishes():
    """Of a server with data-parallel ranks each has a stream of its own; one that publishes nothing is not followed."""
    configs = {rank: {"enable_kv_cache_events": True, "endpoint": f"tcp://*:{7000 + rank}"} for rank in (0, 1)}
    app = web.Application()

    async def tell(_request: web.Request) -> web.Response:
        return web.json_response(configs)

    app.router.add_get("/kv_event_sources", tell)
    index = MemoryIndex()
    async with serving(app) as url, aiohttp.ClientSession() as session:
        client = ReplicaClient(session, url, None, 5.0)
        followers = Followers(index, EventSettings())
        for rank in (0, 1, 2):
            replica = Replica(id=ReplicaId(f"{url}#{rank}"), url=url, rank=rank)
            index.join(replica.id, Namespace("n"), 10)
            await followers.follow(client, replica, MODEL, BLOCK, 10)
        endpoints = [followers.describe(ReplicaId(f"{url}#{rank}")).get("endpoint") for rank in (0, 1, 2)]
        assert endpoints == ["tcp://127.0.0.1:7000", "tcp://127.0.0.1:7001", None]
    await index.close()


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield "http://{}:{}".format(*runner.addresses[0])
    finally:
        await runner.cleanup()


async def test_without_replay_nothing_untrue_outlives_fifty_deliveries():
    """Batches were lost for good: after fifty more answers the index claims nothing that the engine does not hold, and
    what it builds on is certain again."""
    async with rig(1, kv_tokens=1024, replays=False) as it:
        for number in range(12):
            await it.complete(prompt(number))
        await it.events_are("exact")
        await it.fault(0, "lose_events", count=30)
        for number in range(12, 40):
            await it.complete(prompt(number))
        for number in range(60):
            await it.complete(prompt(100 + number % 5))
        port = (await asyncio.to_thread(source, it.urls[0]))["replay_endpoint"].rpartition(":")[2]
        observer = Observer(MODEL).see(await asyncio.to_thread(replayed, int(port)))
        held = {int.from_bytes(cell, "little") for cell in cells_of(observer.chains())}
        (row,) = await it.rows()
        (feed,) = it.service.feeds.followers.feeds.values()
        claimed = set(feed.table.tree.cells[0])
        assert (row["gaps"] > 0, claimed - held) == (True, set())
        assert len(claimed) >= 5 * 8


@pytest.mark.parametrize("kind", ["memory", "redis"])
async def test_what_no_engine_can_have_found_breaks_nothing(kind):
    """An engine may say that it found more of a prompt than there is: then it found all of it."""
    async with rig(1, **{"store.kind": kind}) as it:
        await it.complete(prompt(1))
        await it.events_are("exact")
        (feed,) = it.service.feeds.followers.feeds.values()
        feed.table.suspect()
        ids = tokens_of(prompt(2))
        known = Prompt(chain_of(ids, BLOCK, root_of(MODEL)), len(prompt(2)), BLOCK)
        it.service.feeds.judge(ReplicaId(it.urls[0]), known, 0, 1 << 40)
        assert feed.table.held(known.chain) == 8


async def test_a_silent_stream_is_noticed(monkeypatch):
    """A replica that serves and publishes elsewhere than it says holds what it was sent, and that is reported."""
    monkeypatch.setattr("kvroute.proxy.followers.SILENT_S", 0.5)
    monkeypatch.setattr("kvroute.proxy.followers.SILENT_BLOCKS", 64)
    nowhere = {"events.endpoint": "tcp://127.0.0.1:9", "feeds.metrics_interval_s": 0.1}
    async with rig(1, **nowhere) as it:
        for number in range(20):
            await it.complete(prompt(number))
            await asyncio.sleep(0.05)
        await it.events_are("silent")
        assert (await it.complete(prompt(19)))[0] == 8 * BLOCK


async def test_metrics_say_what_events_are_worth():
    """The state of each replica's events, and what was counted, can be scraped."""
    async with rig(1) as it:
        await it.complete(prompt(1))
        await it.events_are("exact")
        async with it.session.get(f"{it.service.admin_url}/metrics") as answer:
            text = await answer.text()
        assert f'kvroute_events{{replica="{it.urls[0]}",state="exact"}} 1.0' in text
        assert f'kvroute_events_gpu_blocks{{replica="{it.urls[0]}"}} 8.0' in text
