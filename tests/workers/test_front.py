"""The admin listener of several workers where there is none to ask; test_supervisor.py has it before real ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp.test_utils import TestClient, TestServer
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from kvroute.config import Config
from kvroute.workers.front import Front, add_promises, known_by_all
from kvroute.workers.process import WorkerProcess
from kvroute.workers.staff import Post


@asynccontextmanager
async def front(workers: list[WorkerProcess], *, is_stopping: bool = False) -> AsyncIterator[tuple[Front, TestClient]]:
    registry = CollectorRegistry()
    Gauge("kvroute_workers", "Workers", registry=registry).set(len(workers))
    made = Front(
        serving=lambda: workers, living=lambda: workers, own=registry, is_stopping=lambda: is_stopping,
    )  # fmt: skip
    async with TestClient(TestServer(made.app())) as client:
        yield made, client


async def silent_worker() -> WorkerProcess:
    """Return a worker that is gone: nobody listens on its admin socket."""
    process = await asyncio.create_subprocess_exec("/bin/true")
    await process.wait()
    return WorkerProcess(Post(1, 0, 0), Config(), process, "/nowhere/1.sock")


async def test_without_workers():
    """It says that nobody serves, and its own metrics go on."""
    async with front([]) as (_, client):
        for path in ("/ready", "/admin/replicas", "/admin/hit-rate", "/"):
            assert (await client.get(path)).status == 503, path
        assert await (await client.get("/health")).json() == {"status": "ok", "workers": 0}
        assert "kvroute_workers 0.0" in await (await client.get("/metrics")).text()


async def test_a_worker_that_does_not_answer():
    """What only that worker could have said is a 502; the rest is answered."""
    async with front([await silent_worker()]) as (_, client):
        for path in ("/admin/replicas", "/admin/hit-rate", "/"):
            assert (await client.get(path)).status == 502, path
        assert (await client.post("/admin/drain", params={"replica": "x"})).status == 502
        assert (await client.get("/metrics")).status == 200


async def test_stopping_is_not_ready():
    """A router that is about to stop says so, whatever its workers say."""
    async with front([], is_stopping=True) as (_, client):
        answer = await client.get("/ready")
        assert answer.status == 503
        assert (await answer.json())["stopping"] is True


async def test_counts_of_workers_that_are_gone_are_kept():
    """Last words are added to the sums; without them what was seen last is."""
    registry = CollectorRegistry()
    Counter("kvroute_retries", "Retries", registry=registry).inc(3)
    words = generate_latest(registry).decode()
    async with front([]) as (made, client):
        for said in (words, words, ""):
            made.retire(await silent_worker(), said)
        assert "kvroute_retries_total 6.0" in await (await client.get("/metrics")).text()


def test_promises_of_all_workers_are_added():
    """Each replica's own, where both know it."""
    rows = [{"id": "r0", "promised_here": {"requests": 1, "kv_tokens": 10}}]
    others = [
        {"id": "r0", "promised_here": {"requests": 2, "kv_tokens": 5}},
        {"id": "r1", "promised_here": {"requests": 9, "kv_tokens": 9}},
    ]
    add_promises(rows, others)
    assert rows == [{"id": "r0", "promised_here": {"requests": 3, "kv_tokens": 15}}]


async def test_nothing_is_ordered_where_nobody_follows():
    """Without workers an order for the policy fails, and none that comes later is told of it."""
    async with front([]) as (made, client):
        assert (await client.post("/admin/policy", json={"policy": "random"})).status == 503
        for path in ("/admin/holds", "/admin/shadow"):
            assert (await client.get(path)).status == 503, path
        await made.follow({"policy": "random"})  # says so in the log
        await made.welcome(await silent_worker())


async def test_another_sites_page_can_change_nothing():
    """As before a single router, an order that another site's page sends is refused."""
    async with front([]) as (_, client):
        answer = await client.post("/admin/policy", data=b"{}", headers={"Sec-Fetch-Site": "cross-site"})
        assert answer.status == 403


def test_what_workers_know_of_the_index():
    """The owner of a stream speaks for it, whoever is asked first; what was predicted and delivered is added up."""

    def row(replica: str, tokens: int, *, distrusted: bool = False, **more: object) -> dict[str, object]:
        counts = dict.fromkeys(("predicted_tokens", "delivered_tokens", "delivered_unpredicted_tokens"), tokens)
        return {"replica": replica, **more, **counts, "distrusted": distrusted}

    owned, heard = {"events": "exact", "owner": True, "batches": 7}, {"events": "exact", "owner": False}
    one = {"index": "a", "replicas": [row("r0", 1, **owned), row("r1", 10, **heard), row("r2", 100, events="none")]}
    two = {"index": "a", "replicas": [row("r0", 2, **heard), row("r1", 20, distrusted=True, **owned)]}
    assert known_by_all([one, two]) == {
        "index": "a",
        "replicas": [row("r0", 3, **owned), row("r1", 30, distrusted=True, **owned), row("r2", 100, events="none")],
    }
