"""The router that listens to the engines' events dies, or stands still; the other one goes on where it was."""

from __future__ import annotations

import asyncio
import json
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest
import redis

from tests.admin import fetch, until
from tests.observer import Observer, cells_in, cells_of, replayed
from tests.processes import Router, SimulatedReplica, Valkey

pytestmark = pytest.mark.slow  # real processes, many of them

REPLICA = ("--kv-tokens", "4096", "--block-size", "16", "--speed", "20", "--kv-events", "tcp://*:0")
REPLAY = ("--kv-events-replay", "tcp://*:0")
OWNED_S = 3.0  # by the other router, from the kill on


def rows(router: Router) -> dict[str, dict[str, Any]]:
    return {row["replica"]: row for row in json.loads(fetch(router.admin + "/admin/index"))["replicas"]}


def owned(router: Router) -> set[str]:
    return {replica for replica, row in rows(router).items() if row.get("owner") and row["events"] == "exact"}


def observed(replica: str, model: str) -> Observer:
    sources = json.loads(fetch(replica + "/kv_event_sources"))
    return Observer(model).see(replayed(urlsplit(sources["0"]["replay_endpoint"].replace("*", "localhost")).port))


def disagreement(store: redis.Redis, replica: str, model: str) -> tuple[int, int]:
    """Count the blocks that only the index, and only the engine says to be held."""
    expected, found = cells_of(observed(replica, model).chains()), cells_in(store, replica)
    return len(found - expected), len(expected - found)


async def load(url: str, model: str, turns: Iterator[Any], seed: int) -> list[int]:
    """Send prompts that share beginnings, eight at a time, as many as there are turns; return the statuses."""
    rng, statuses = random.Random(seed), []
    async with aiohttp.ClientSession(url) as session:

        async def client() -> None:
            for _ in turns:
                which = rng.randrange(30)
                ids = [which % 5 * 1000 + i for i in range(64)] + [
                    which * 100 + i for i in range(rng.randrange(17, 400))
                ]
                body = {"model": model, "prompt": ids, "max_tokens": 20, "ignore_eos": True}
                async with session.post("/v1/completions", json=body) as answer:
                    await answer.read()
                    statuses.append(answer.status)

        await asyncio.gather(*[client() for _ in range(8)])
    return statuses


@contextmanager
def shared(tmp_path: Path) -> Iterator[tuple[Router, Router, str, list[str], redis.Redis]]:
    """Two routers that share three replicas' streams, with load behind them; the model, the replicas, the store."""
    valkey = Valkey(tmp_path / "valkey.log")
    replicas = [SimulatedReplica(*REPLICA, *REPLAY, log=tmp_path / f"r{n}.log") for n in range(3)]
    with valkey, replicas[0], replicas[1], replicas[2]:
        urls = [replica.url for replica in replicas]
        env = {"KVROUTE_STORE__URL": valkey.url}
        victim = Router(*urls, log=tmp_path / "victim.log", env=env)
        with victim, Router(*urls, log=tmp_path / "other.log", env=env) as other:
            model = json.loads(fetch(urls[0] + "/v1/models"))["data"][0]["id"]
            asyncio.run(load(victim.url, model, iter(range(100)), 1))
            share_all(victim, other, urls)
            with redis.Redis(port=valkey.port) as store:
                yield victim, other, model, urls, store


def share_all(one: Router, other: Router, urls: list[str]) -> None:
    both = until(lambda: (owned(one), owned(other)), lambda o: len(o[0]) + len(o[1]) == 3 and all(o), 20)
    assert both[0] | both[1] == set(urls)
    assert both[0] & both[1] == set()


def nothing_is_missed(store: redis.Redis, urls: list[str], model: str) -> None:
    for url in urls:
        agreed = until(lambda url=url: disagreement(store, url, model), lambda found: found == (0, 0), 10)
        assert agreed == (0, 0)
        assert observed(url, model).removals > 0


def test_a_killed_owner_is_replaced_and_nothing_is_missed(tmp_path: Path) -> None:
    """Two routers share three replicas' streams. One is killed under load: the other owns all 3 s later, the index
    holds what the engines hold, and no request of the other router fails."""
    with shared(tmp_path) as (victim, other, model, urls, store):
        enough = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(asyncio.run, load(other.url, model, iter(enough.is_set, True), 2))
            time.sleep(0.5)
            victim.kill()
            try:
                assert until(lambda: owned(other), lambda o: len(o) == 3, OWNED_S) == set(urls)
            finally:
                enough.set()
        assert set(loaded.result()) == {200}
        nothing_is_missed(store, urls, model)


def test_an_owner_that_stood_still_does_not_disturb_its_successor(tmp_path: Path) -> None:
    """One of the routers is stopped under load until the other owns all streams, and goes on: what it writes of what it
    had heard is refused, both share the streams again, and the index holds what the engines hold."""
    with shared(tmp_path) as (victim, other, model, urls, store):
        enough = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            loaded = pool.submit(asyncio.run, load(other.url, model, iter(enough.is_set, True), 2))
            try:
                for _ in range(2):
                    time.sleep(0.5)
                    victim.signal(signal.SIGSTOP)
                    assert until(lambda: owned(other), lambda o: len(o) == 3, OWNED_S) == set(urls)
                    victim.signal(signal.SIGCONT)
                    share_all(victim, other, urls)
            finally:
                victim.signal(signal.SIGCONT)
                enough.set()
        assert set(loaded.result()) == {200}
        nothing_is_missed(store, urls, model)
