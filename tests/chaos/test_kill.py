"""One of two replicas dies under load."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest

from tests.chaos.clients import Seen, chat, stream, until_begun
from tests.processes import Router, SimulatedReplica

pytestmark = pytest.mark.slow  # real processes, many of them

CLIENTS = 40
ALL_ANSWERED_S = 60.0  # none hangs
PROMPT = "word " * 1500
REPLICA = ("--kv-tokens", "200000", "--speed", "1")


def body(number: int) -> dict[str, object]:
    return chat(f"{number} {PROMPT}", max_tokens=150, ignore_eos=True)


async def load(url: str, victim: SimulatedReplica) -> list[tuple[Seen, bool]]:
    """Stream from all, kill the victim among its first answers; pair what each saw with whether it had begun."""
    everyone = [Seen() for _ in range(CLIENTS)]
    async with aiohttp.ClientSession(url, connector=aiohttp.TCPConnector(limit=0)) as session:
        tasks = [asyncio.ensure_future(stream(session, body(n), seen)) for n, seen in enumerate(everyone)]
        await until_begun(everyone, victim.url, 3, ALL_ANSWERED_S)
        had_begun = [seen.began.is_set() for seen in everyone]
        victim.kill()
        await asyncio.wait_for(asyncio.gather(*tasks), ALL_ANSWERED_S)
    return list(zip(everyone, had_begun, strict=True))


def test_a_killed_replica_costs_only_the_answers_under_way(tmp_path):
    """Requests without a byte are answered by the other replica, those under way end with an error that shows."""
    with (
        SimulatedReplica(*REPLICA, log=tmp_path / "r0.log") as victim,
        SimulatedReplica(*REPLICA, log=tmp_path / "r1.log") as other,
        Router(victim.url, other.url, log=tmp_path / "router.log") as router,
    ):
        seen = asyncio.run(load(router.url, victim))
    failed = [(one, had_begun) for one, had_begun in seen if not one.is_done]
    rescued = [one for one, had_begun in seen if one.is_done and not had_begun]
    assert failed, "nothing was under way on the killed replica: the test showed nothing"
    assert rescued, "all had begun: the test showed nothing"
    assert [one for one, had_begun in failed if not had_begun or not one.error or one.status != 200] == []
