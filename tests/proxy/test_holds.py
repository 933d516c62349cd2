"""What a router says about requests that wait for memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from kvroute.proxy.holds import merged
from tests.proxy.pool import Pool, running_pool

SMALL = {"kv_tokens": 640, "speed": 1.0}  # a cache that one of the answers below nearly fills, for some seconds


def asking(pool: Pool, number: int, headers: dict[str, str] | None = None) -> asyncio.Task[int]:
    """Send a chat that no other one begins like."""

    async def ask() -> int:
        body = {"messages": [{"role": "user", "content": f"{number} " * 40}], "max_tokens": 400, "ignore_eos": True}
        url = pool.service.url + "/v1/chat/completions"
        async with pool.http.post(url, json=body, headers=headers) as answer:
            return answer.status

    return asyncio.ensure_future(ask())


async def left(task: asyncio.Task[int]) -> None:
    """Have a client leave."""
    task.cancel()
    await asyncio.wait([task])


async def holds(pool: Pool, until: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Read the report until it says what is awaited."""
    for _ in range(500):
        _, report = await pool.admin("/admin/holds")
        if until(report):
            return report
        await asyncio.sleep(0.02)
    raise AssertionError(report)


async def test_what_waits_and_what_lives_is_listed():
    """Behind an answer that fills the cache the others stand in line; each goes when there is room."""
    async with running_pool(1, **SMALL, tenants__header="x-tenant") as pool:
        first = asking(pool, 0)
        await holds(pool, lambda report: report["live"])
        others = [asking(pool, number, {"x-tenant": f"t{number}"}) for number in (1, 2)]
        report = await holds(pool, lambda report: len(report["held"]) == 2)
        assert {row["tenant"] for row in report["held"]} == {"t1", "t2"}
        assert sorted(row["position"] for row in report["held"]) == [1, 2]
        assert all(row["reason"] and row["left_s"] > 200 for row in report["held"])
        (live,) = report["live"]
        assert (live["replica"], live["conversations"], live["under_way"]) == (pool.urls[0], 1, 1)
        assert 200 < live["now_tokens"] <= live["peak_tokens"]
        _, explained = await pool.admin(
            "/admin/explain", "POST", json={"messages": [{"role": "user", "content": "9 " * 40}], "max_tokens": 400}
        )
        assert explained["admission"]["verdict"] == "waits"
        assert explained["admission"]["rule"] == "line"
        assert explained["admission"]["ahead"] == 2
        assert "held" in explained["choice"]["why"]
        await left(first)
        await holds(pool, lambda report: report["counts"]["placed"] == 1)
        await asyncio.gather(*map(left, others))
        counts = (await holds(pool, lambda report: not report["held"]))["counts"]
        assert (counts["begun"], counts["now"], counts["placed"] + counts["left"]) == (2, 0, 2)
        assert counts["longest_s"] > 0


async def test_a_higher_class_goes_first():
    """Of two that wait, the one of the higher class is placed before the one that came earlier."""
    classes = {"tenants__classes": {"gold": 5}, "tenants__class_header": "x-class"}
    async with running_pool(1, **SMALL, **classes) as pool:
        first = asking(pool, 0)
        await holds(pool, lambda report: report["live"])
        early = asking(pool, 1)
        await holds(pool, lambda report: len(report["held"]) == 1)
        gold = asking(pool, 2, {"x-class": "gold"})
        report = await holds(pool, lambda report: len(report["held"]) == 2)
        assert [(row["priority"], row["position"]) for row in report["held"]] == [(0, 2), (5, 1)]
        await left(first)
        report = await holds(pool, lambda report: report["counts"]["placed"])
        assert [row["priority"] for row in report["held"]] == [0]
        await asyncio.gather(left(gold), left(early))


async def test_a_client_that_leaves_and_a_bound_that_is_over_are_counted():
    """Each hold has one end: the client's leaving, or its bound."""
    async with running_pool(1, kv_tokens=640, speed=0.5, routing__holds={"wait_s": 4, "requests_max": 2}) as pool:
        first = asking(pool, 0)
        await holds(pool, lambda report: report["live"])
        leaver, stayer = asking(pool, 1), asking(pool, 2)
        await holds(pool, lambda report: len(report["held"]) == 2)
        assert await asking(pool, 3) == 429
        leaver.cancel()
        assert await stayer == 429
        counts = (await holds(pool, lambda report: not report["counts"]["now"]))["counts"]
        assert (counts["begun"], counts["left"], counts["expired"], counts["refused"]) == (2, 1, 1, 1)
        _, text = await pool.admin("/metrics")
        assert 'kvroute_holds_ended_total{outcome="expired"} 1.0' in text
        assert "kvroute_holds_refused_total 1.0" in text
        assert "kvroute_hold_seconds_count 2.0" in text
        assert f'kvroute_replica_live_conversations{{replica="{pool.urls[0]}"}} 1.0' in text
        await left(first)


async def test_where_nothing_is_held():
    """Without holds the report says so."""
    async with running_pool(1, routing__holds={"enabled": False}) as pool:
        _, report = await pool.admin("/admin/holds")
        assert report["is_on"] is False
        assert report["held"] == report["live"] == []


def one(**fields: Any) -> dict[str, Any]:
    """Make a process's report."""
    counts = {"now": 1, "begun": 4, "placed": 3, "longest_s": 2.0}
    live = {
        "replica": "a", "conversations": 2, "under_way": 1, "now_tokens": 50, "peak_tokens": 80,
        "capacity_tokens": 1000, "limit_tokens": 800,
    }  # fmt: skip
    report = {
        "is_on": True, "counts": counts, "held": [{"hold": 1, "waited_s": 1.0}], "live": [live],
        "learnt": [{"model": "m", "turns_seen": 3}], "fill": 0.8, "lost": 0.0, "held_bytes": 10,
    }  # fmt: skip
    return report | fields


def test_reports_of_several_processes_add_up():
    """Counts and tokens are summed, capacities are not; the longest hold is the longest of all."""
    other = one(
        counts={"now": 2, "begun": 5, "placed": 3, "longest_s": 9.0},
        held=[{"hold": 1, "waited_s": 3.0}],
        learnt=[{"model": "m", "turns_seen": 8}],
        fill=0.6,
    )
    report = merged([one(), other])
    assert report["counts"] == {"now": 3, "begun": 9, "placed": 6, "longest_s": 9.0}
    assert [row["waited_s"] for row in report["held"]] == [3.0, 1.0]
    assert report["live"][0] == one()["live"][0] | {
        "conversations": 4, "under_way": 2, "now_tokens": 100, "peak_tokens": 160,
    }  # fmt: skip
    assert report["learnt"] == [{"model": "m", "turns_seen": 8}]
    assert (report["fill"], report["held_bytes"]) == (0.7, 20)


def test_one_process_is_as_it_says():
    """Merging one report changes nothing, also where nothing is held."""
    off = {"is_on": False, "counts": {"now": 0, "longest_s": 0.0}, "held": [], "live": [], "learnt": []}
    for report in (one(), off):
        assert merged([report]) == report
