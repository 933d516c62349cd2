"""Clients that leave, and an engine that dies, before real engines."""

from __future__ import annotations

import asyncio

import aiohttp

from tests.admin import metric, replicas, until
from tests.chaos.clients import Seen, chat, open_connections, stream, until_begun
from tests.processes import free_port
from tests.vllm.engines import Engines

LEAVERS = 40
GONE_S = 5.0
CLIENTS = 32
ALL_ANSWERED_S = 90.0  # none hangs


async def leave_in_the_middle(url: str) -> list[Seen]:
    """Half leave after their first event, the other half while their long prompts wait or are computed."""
    streams = [chat(f"{n} go on", max_tokens=20_000, ignore_eos=True) for n in range(LEAVERS // 2)]
    prefills = [chat(f"{n} " + "word " * 20_000, max_tokens=10) for n in range(LEAVERS // 2)]
    everyone = [Seen() for _ in range(LEAVERS)]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        begun = [
            asyncio.ensure_future(stream(session, body, seen)) for body, seen in zip(streams, everyone, strict=False)
        ]
        await asyncio.gather(*(asyncio.wait_for(seen.began.wait(), 60) for seen in everyone[: LEAVERS // 2]))
        waiting = [
            asyncio.ensure_future(stream(session, body, seen))
            for body, seen in zip(prefills, everyone[LEAVERS // 2 :], strict=True)
        ]
        await asyncio.sleep(0.5)
        for task in begun + waiting:
            task.cancel()
        await asyncio.gather(*begun, *waiting, return_exceptions=True)
    return everyone


def test_clients_that_leave_are_forgotten(engines, router):
    """No lease and no connection is left, both engines are idle, and no replica is blamed."""
    seen = asyncio.run(leave_in_the_middle(router.url))
    assert [one.error for one in seen if one.error] == []
    port = int(router.url.rpartition(":")[2])

    def left() -> tuple[float, ...]:
        names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
        working = sum(metric(url, name) for url in engines.urls for name in names)
        return sum(row["promised"]["requests"] for row in replicas(router.admin)), open_connections(port), working

    assert until(left, lambda now: now == (0, 0, 0), GONE_S) == (0, 0, 0)
    assert [(row["is_healthy"], row["consecutive_failures"]) for row in replicas(router.admin)] == [(True, 0)] * 2


async def load(url: str, victims: Engines) -> list[tuple[Seen, bool]]:
    """Stream from all, kill the victim among its first answers; pair what each saw with whether it had begun."""
    everyone = [Seen() for _ in range(CLIENTS)]
    bodies = [chat(f"{n} " + "word " * 6000, max_tokens=800, ignore_eos=True) for n in range(CLIENTS)]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [
            asyncio.ensure_future(stream(session, body, seen)) for body, seen in zip(bodies, everyone, strict=True)
        ]
        await until_begun(everyone, victims.urls[0], 2, ALL_ANSWERED_S)
        had_begun = [seen.began.is_set() for seen in everyone]
        victims.kill(0)
        await asyncio.wait_for(asyncio.gather(*tasks), ALL_ANSWERED_S)
    return list(zip(everyone, had_begun, strict=True))


def test_a_killed_engine_costs_only_the_answers_under_way(engines, model_dir, start_router, tmp_path):
    """Requests without a byte are answered by the other engine, those under way end with an error that shows."""
    with Engines(model_dir, tmp_path) as victims:
        victims.start([(free_port(), free_port(), free_port())])
        router = start_router(urls=[victims.urls[0], engines.urls[0]])
        seen = asyncio.run(load(router.url, victims))
    failed = [(one, had_begun) for one, had_begun in seen if not one.is_done]
    assert failed, "nothing was under way on the killed engine: the test showed nothing"
    assert [one for one, had_begun in seen if one.is_done and not had_begun], "all had begun: the test showed nothing"
    assert [one for one, had_begun in failed if not had_begun or not one.error or one.status != 200] == []
