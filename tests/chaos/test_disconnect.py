"""Two hundred clients that leave before their answers are complete."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from tests.admin import fetch, metric, replicas, until
from tests.chaos.clients import Seen, chat, open_connections, stream
from tests.processes import Router, SimulatedReplica

pytestmark = pytest.mark.slow  # real processes, many of them

CLIENTS = 200
GONE_S = 5.0  # nothing of them is left by then
REPLICA = ("--kv-tokens", "400000", "--speed", "2")


async def leave_in_the_middle(url: str) -> list[Seen]:
    """Half of the clients leave after their first event, the other half while their long prompts are computed."""
    streams = [chat(f"{n} go", max_tokens=4000, ignore_eos=True) for n in range(CLIENTS // 2)]
    prefills = [chat(f"{n} " + "word " * 2000, max_tokens=10) for n in range(CLIENTS // 2)]
    everyone = [Seen() for _ in range(CLIENTS)]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.ensure_future(stream(session, body, seen))
            for body, seen in zip(streams + prefills, everyone, strict=True)
        ]
        await asyncio.gather(*(asyncio.wait_for(seen.began.wait(), 60) for seen in everyone[: CLIENTS // 2]))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return everyone


def engine_state(url: str) -> tuple[int, int]:
    state = json.loads(fetch(f"{url}/_state"))
    return state["running"], state["waiting"]


def test_clients_that_leave_are_forgotten(tmp_path):
    """No lease and no connection is left, the engines have stopped the work, and no replica is blamed."""
    with (
        SimulatedReplica(*REPLICA, log=tmp_path / "r0.log") as one,
        SimulatedReplica(*REPLICA, log=tmp_path / "r1.log") as two,
        Router(one.url, two.url, log=tmp_path / "router.log") as router,
    ):
        seen = asyncio.run(leave_in_the_middle(router.url))
        assert [one.error for one in seen if one.error] == []
        port = int(router.url.rpartition(":")[2])

        def left() -> tuple[object, ...]:
            in_flight = sum(row["promised"]["requests"] for row in replicas(router.admin))
            return in_flight, open_connections(port), engine_state(one.url), engine_state(two.url)

        assert until(left, lambda now: now == (0, 0, (0, 0), (0, 0)), GONE_S) == (0, 0, (0, 0), (0, 0))
        assert [(row["is_healthy"], row["consecutive_failures"]) for row in replicas(router.admin)] == [(True, 0)] * 2
        names = ("kvroute_requests_active", "kvroute_retries_total", "kvroute_unexpected_errors_total")
        assert [metric(router.admin, name) for name in names] == [0, 0, 0]
