"""The index against a real engine with a small cache: hash for hash what the engine itself tells, and so are hits."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvroute.adapters import redis_events
from tests.adapters.publishers import Line
from tests.observer import cells_in, cells_of, replayed
from tests.processes import Valkey, free_port
from tests.vllm.engines import Engines
from tests.vllm.rig import BLOCK, SMALL, Rig, new_session, revive, routed

REQUESTS, REMOVALS_MIN = 500, 2_000
MISSED = 200  # batches


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engines]:
    """One engine with a small pool."""
    with Engines(model_dir, tmp_path_factory.mktemp("small")) as engines:
        yield engines.start([(free_port(), free_port(), free_port())], *SMALL)


@pytest.fixture
async def rig(small: Engines, valkey: Valkey):
    """A router before the engine."""
    async with routed(small, valkey) as rig:
        yield rig


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


async def test_a_reset_through_the_router_is_known_without_a_request(rig):
    """The engine, which would tell of it with its next step only, is made to tell at once."""
    await rig.load(20)
    await rig.agrees()
    order = {"replica": rig.engines.urls[0]}
    async with rig.session.post(f"{rig.service.admin_url}/admin/reset", json=order) as answer:
        assert (answer.status, await answer.json()) == (200, {"reset": rig.engines.urls})
    await rig.heard()
    assert (await rig.agrees()).chains() == set()
    ids, salt = rig.prompt()
    assert await rig.complete(ids, salt) == (0, 0)


async def test_an_engine_that_slept_wakes_with_an_empty_cache(rig):
    """It is not used while it sleeps; woken, it holds nothing, and the index says so before any request."""
    await rig.load(20)
    await rig.agrees()
    for order, is_available in (("sleep?level=1", False), ("wake_up", True)):
        async with rig.session.post(f"{rig.engines.urls[0]}/{order}") as answer:
            assert answer.status == 200
        async with asyncio.timeout(30):
            while rig.service.fleet.states()[0].is_available != is_available:
                await asyncio.sleep(0.05)
    await rig.heard()
    assert (await rig.agrees()).chains() == set()
    await rig.load(20)
    await rig.agrees()


async def test_a_warm_engine_is_learnt_by_a_new_router(rig):
    """A router that starts before a warm engine holds what the engine holds, before any request."""
    await rig.agrees()
    assert (await asyncio.to_thread(rig.observer)).chains()


def last_number(engines: Engines) -> int:
    """Return the number of the engine's newest batch, -1 where it has none."""
    told = replayed(engines.engines[0].replay_port)
    return int(told[-1][0]) if told else -1


async def test_a_router_cut_off_for_hundreds_of_batches_misses_none(small: Engines, valkey: Valkey) -> None:
    """Its lines to the engine's events are cut; what the engine does meanwhile for others is replayed."""
    (engine,) = small.engines
    lines = [await Line(f"tcp://127.0.0.1:{port}").mend() for port in (engine.events_port, engine.replay_port)]
    names = dict(zip(("events__endpoint", "events__replay_endpoint"), (line.endpoint for line in lines), strict=True))
    topic = f"kv@{engine.name}@tiny"
    async with routed(small, valkey, events__topic=topic, **names) as rig:
        await rig.load(40)
        await rig.agrees()
        before = await rig.events()
        for line in lines:
            await line.cut()
        while await asyncio.to_thread(last_number, small) < before["sequence"] + MISSED:
            await rig.load(40, url=small.urls[0])
        for line in lines:
            await line.mend()
        await rig.agrees()
        assert await rig.wrong(30) == []
        after = await rig.events()
        assert after["sequence"] >= before["sequence"] + MISSED
        assert (after["gaps"], after["lives"]) == (before["gaps"], before["lives"]) == (0, 0)
    for line in lines:
        await line.cut()


async def test_without_replay_nothing_untrue_stays_and_what_is_used_is_certain(small: Engines, valkey: Valkey) -> None:
    """A router that comes late and can ask for no replay: what requests find it is told by the engine's own names, and
    after fifty deliveries it claims nothing that the engine does not hold."""
    (engine,) = small.engines
    events = {"events__endpoint": f"tcp://127.0.0.1:{engine.events_port}", "events__topic": f"kv@{engine.name}@tiny"}
    async with routed(small, valkey) as rig:
        await rig.load(20)
    async with new_session() as rig.session:
        await rig.load(20, url=small.urls[0])
    async with routed(small, valkey, **events) as rig:
        await rig.load(16)
        reporter = rig.service.feeds.reporter
        async with asyncio.timeout(30):
            while not reporter.asked:
                await rig.load(8)
        row = await rig.events()
        assert (row["gaps"] > 0, row["of_blocks"]["learnt"] > 0) == (True, True)
        await rig.load(60)
        observer, found = None, set()
        async with asyncio.timeout(20):
            while observer is None or not found <= cells_of(observer.chains()):
                observer = await asyncio.to_thread(rig.observer)
                found = await asyncio.to_thread(cells_in, rig.store, small.urls[0])
        assert found


async def test_a_killed_engine_begins_anew(rig):
    """An engine that is killed and started again on its ports is empty, and followed as before."""
    await rig.load(40)
    await rig.agrees()
    engine = rig.engines.engines[0]
    await asyncio.to_thread(revive, rig.engines, *SMALL)
    assert rig.engines.engines[0].port == engine.port
    await rig.load(60)
    await rig.agrees()
    assert await rig.wrong(30) == []


async def snapshot_kept(rig: Rig) -> None:
    """Wait until a successor would find where the router has got to, in the life that the store has of the engine."""
    (shard,) = rig.service.feeds._index._all_shards()
    (member,) = shard.members.values()
    async with asyncio.timeout(30):
        while not (
            member.writer.is_caught_up
            and not member.writer.feed.is_astray
            and rig.store.exists(shard.prefix + b"q" + member.slot)
        ):
            await asyncio.sleep(0.2)


async def test_an_engine_restarted_while_the_router_was_away_is_another_one(
    small: Engines, valkey: Valkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has counted past the old one's number: the router that comes back knows it by the batch under that number."""
    monkeypatch.setattr(redis_events, "SNAPSHOT_S", 3.0)
    async with routed(small, valkey) as rig:
        await rig.load(30)
        await rig.agrees()
        await snapshot_kept(rig)
        known = (await rig.events())["sequence"]
    await asyncio.to_thread(revive, small, *SMALL)
    async with new_session() as rig.session:
        while await asyncio.to_thread(last_number, small) <= known:
            await rig.load(60, url=small.urls[0])
    async with routed(small, valkey) as rig:
        await rig.agrees()
        assert (await rig.events())["lives"] == 1
        await rig.load(30)
        await rig.agrees()
        assert await rig.wrong(30) == []
