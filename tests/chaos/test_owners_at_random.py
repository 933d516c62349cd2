"""Routers come, go, die and stand still, Redis loses everything, engines restart: the index is what the engines say."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from kvroute.adapters import redis_events
from kvroute.adapters.event_feed import EventFeed
from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.store import open_link
from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.events import decode_batch
from kvroute.routing.replica import ReplicaId
from tests.adapters.streams import Engine
from tests.adapters.test_redis_index import NS, R0, R1, chain
from tests.contracts.test_followed import WINDOW
from tests.kv.encoded import cleared, encoded, removed, stored
from tests.redis_servers import Server, server, until

pytestmark = pytest.mark.slow  # half a minute

HISTORIES, STEPS, ROUTERS_MAX = 8, 40, 4
ACTS = {
    "say": 30,
    "die": 2,
    "join": 3,
    "leave": 1,
    "flush": 1,
    "redis": 1,
    "restart": 2,
    "stand": 2,
    "anew": 1,
    "wait": 4,
}


class Router:
    """One router's index, and its feeds."""

    def __init__(self, url: str, name: str) -> None:
        self.link = open_link(url)
        self.index = RedisIndex(self.link, deployment="t", router_id=name, deadline_s=5.0)
        self.feeds: dict[ReplicaId, EventFeed] = {}

    async def start(self, engines: dict[ReplicaId, Engine]) -> Router:
        await self.link.start()
        await self.index.start()
        for replica, engine in engines.items():
            self.follow(replica, engine)
        return self

    def follow(self, replica: ReplicaId, engine: Engine) -> None:
        self.feeds[replica] = engine.feed()
        self.index.join(replica, NS, 1000)
        self.index.follow(replica, self.feeds[replica])

    async def stop(self) -> None:
        await self.index.close()
        await self.link.close()

    async def die(self, engines: dict[ReplicaId, Engine]) -> None:
        """Say nothing more to anybody."""
        self.index._task.cancel()
        self.link.run = lambda *_: False
        for engine in engines.values():
            engine.listeners[:] = [one for one in engine.listeners if one.sink not in self.feeds.values()]
        await self.link.close()

    async def stand(self, seconds: float) -> None:
        """Do nothing in the background for a while; what engines say is heard."""
        self.index._task.cancel()
        await asyncio.sleep(seconds)
        self.index._task = asyncio.get_running_loop().create_task(self.index._upkeep.run())


class History:
    """Two engines, one of them a hybrid, and what a plain table of all that they said would have."""

    def __init__(self, seed: int, redis: Server) -> None:
        self.rng, self.redis, self.names = random.Random(seed), redis, (f"r{n}" for n in range(1000))
        self.engines = {R0: Engine(), R1: Engine()}
        self.plain = {replica: EngineHashes("m", 1000) for replica in self.engines}
        self.routers: list[Router] = []
        self.prompts: set[tuple[int, ...]] = set()

    async def join(self) -> None:
        if len(self.routers) < ROUTERS_MAX:
            self.routers.append(await Router(self.redis.url, next(self.names)).start(self.engines))

    def say(self, replica: ReplicaId, *events: dict[str, Any]) -> None:
        self.plain[replica].apply(decode_batch(encoded(list(events))))
        self.engines[replica].say(*events)

    def say_something(self, replica: ReplicaId) -> None:
        ids = tuple(self.rng.choices(range(3), k=self.rng.randint(1, 5)))
        self.prompts.add(ids)
        group = WINDOW if replica == R1 and self.rng.random() < 0.3 else {"group_idx": 0}
        name, parent = (int("1" + "".join(map(str, some))) for some in (ids, ids[:-1]))
        what = self.rng.random()
        if what < 0.6:
            self.say(replica, stored([name], parent if ids[1:] else None, [ids[-1]], 1, **group))
        elif what < 0.97:
            self.say(replica, removed(name, group_idx=group["group_idx"]))
        else:
            self.say(replica, cleared())

    async def act(self, what: str, replica: ReplicaId) -> None:
        rng, is_alone = self.rng, len(self.routers) == 1
        if what == "say":
            for _ in range(rng.randint(1, 20)):
                self.say_something(replica)
        elif what == "join":
            await self.join()
        elif what in ("die", "leave") and not is_alone:
            router = self.routers.pop(rng.randrange(len(self.routers)))
            await (router.die(self.engines) if what == "die" else router.stop())
        elif what == "flush":
            with self.redis.client() as client:
                client.flushall()
        elif what == "redis":
            self.redis.kill()
            await asyncio.sleep(rng.random())
            self.redis.start()
        elif what == "restart":
            self.engines[replica].restart()
            self.plain[replica].clear()
            self.say(replica, cleared())
        elif what == "stand":
            await rng.choice(self.routers).stand(rng.uniform(0.5, 3.0))
        elif what == "anew":
            router = rng.choice(self.routers)
            router.index.leave(replica)
            await asyncio.sleep(rng.choice((0.0, 0.1)))
            router.follow(replica, self.engines[replica])
        elif what == "wait":
            await asyncio.sleep(1.5 * rng.random())

    async def agrees(self) -> bool:
        asked = [chain(*ids, 9) for ids in sorted(self.prompts)]
        expected = [{r: n for r, table in self.plain.items() if (n := table.reusable(one))} for one in asked]
        for router in self.routers:
            match = await router.index.match(NS, asked)
            if match.source != "index" or [dict(holding) for holding in match.holdings] != expected:
                return False
        return True


async def play(seed: int) -> None:
    with server() as redis:
        history = History(seed, redis)
        for _ in range(2):
            await history.join()
        for replica in history.engines:
            history.say(replica, cleared())
        acts = history.rng.choices(list(ACTS), list(ACTS.values()), k=STEPS)
        for what in acts:
            await history.act(what, history.rng.choice((R0, R1)))
            await asyncio.sleep(history.rng.choice((0.0, 0.0, 0.02, 0.2)))
        try:
            await until(history.agrees)
        except AssertionError:
            raise AssertionError(f"history {seed}: {acts}") from None
        finally:
            for router in history.routers:
                await router.stop()


async def test_the_index_is_what_the_engines_say(monkeypatch):
    """Whatever happens to routers, store and engines: at rest every router answers what a plain table of all events
    says, where hits of a hybrid end included."""
    monkeypatch.setattr(redis_events, "SNAPSHOT_S", 0.7)
    async with asyncio.TaskGroup() as group:
        for seed in range(HISTORIES):
            group.create_task(play(seed))
