"""The store dies under load and comes back empty."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import aiohttp
import pytest
import redis

from tests.admin import metric
from tests.chaos.clients import Seen, chat, stream
from tests.processes import Router, SimulatedReplica, Valkey

pytestmark = pytest.mark.slow  # real processes, many of them

WORKERS = 6
BACK_S = 2.0  # the index is used again by then
LATE_SHARE_MAX = 0.2  # of lookups, when it is: those that a busy machine answers after the deadline
REPLICA = ("--kv-tokens", "100000", "--speed", "20")


async def keep_asking(session: aiohttp.ClientSession, worker: int, stop: asyncio.Event, answers: list[Seen]) -> None:
    """Ask again and again, with prompts that share a prefix, until told to stop."""
    number = 0
    while not stop.is_set():
        number += 1
        prompt = f"worker {worker} " + "shared words " * 200 + f" question {number}"
        answers.append(await stream(session, chat(prompt, max_tokens=8), Seen()))


async def load(url: str, act: Callable[[], list[tuple[float, float]]]) -> tuple[list[Seen], list[tuple[float, float]]]:
    """Keep workers asking while `act` plays out; return all answers and what `act` saw."""
    answers: list[Seen] = []
    stop = asyncio.Event()
    async with (
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=30)) as session,
        asyncio.TaskGroup() as group,
    ):
        for worker in range(WORKERS):
            group.create_task(keep_asking(session, worker, stop, answers))
        noted = await asyncio.to_thread(act)
        stop.set()
    return answers, noted


def test_a_store_that_dies_fails_no_request(tmp_path):
    """No request fails, local answers are counted meanwhile, and the index is used again within 2 s of its return."""
    with (
        Valkey(tmp_path / "valkey.log") as valkey,
        SimulatedReplica(*REPLICA, log=tmp_path / "r0.log") as one,
        SimulatedReplica(*REPLICA, log=tmp_path / "r1.log") as two,
        Router("--redis", valkey.url, one.url, two.url, log=tmp_path / "router.log") as router,
    ):

        def lookups() -> tuple[float, float]:
            names = ("kvroute_lookups_total", "kvroute_index_local_answers_total")
            asked, local = (metric(router.admin, name) for name in names)
            return asked, local

        def act() -> list[tuple[float, float]]:
            noted = []
            for step in (valkey.kill, valkey.start):
                time.sleep(1.5)
                noted.append(lookups())
                step()
            time.sleep(BACK_S)
            noted.append(lookups())
            time.sleep(1.0)
            return [*noted, lookups()]

        answers, (dead, returned, back, end) = asyncio.run(load(router.url, act))
        with redis.Redis.from_url(valkey.url) as store:
            keys = store.dbsize()
    assert [one for one in answers if not one.is_done] == []
    assert (returned[1] > dead[1], keys > 0) == (True, True)
    assert local_share(back, end) < LATE_SHARE_MAX


def local_share(start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the share of lookups between two readings that the index did not answer in time."""
    return (end[1] - start[1]) / (end[0] - start[0])
