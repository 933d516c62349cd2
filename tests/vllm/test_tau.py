"""Sixty recorded airline conversations through two engines: what the routing delivers of what could be had."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from rich.table import Table

from tests.admin import hit_rate
from tests.vllm.conversations import Call, Feed, read_conversations, replay

POLICIES = ("round-robin", "kvroute")
CONVERSATIONS = 60
AT_ONCE = 4
DELIVERED_SHARE_MIN = 0.97  # of reachable tokens


@pytest.mark.parametrize("feed", ["recorded", "own"])
def test_nearly_all_reachable_tokens_are_delivered(engines, start_router, report, feed: Feed):
    """At least 0.97 of the tokens that some replica held are reused, and more than round robin reuses."""
    conversations = read_conversations("tau_airline_text_a", CONVERSATIONS)
    results: dict[str, tuple[list[Call], dict[str, Any], float]] = {}
    for policy in POLICIES:
        engines.reset_caches()
        router = start_router(routing__policy=policy)
        began = time.monotonic()
        calls = asyncio.run(replay(router.url, conversations, feed=feed, at_once=AT_ONCE, stream=True))
        took_s = time.monotonic() - began
        results[policy] = calls, hit_rate(router.admin, requests=len(calls)), took_s
        router.stop()
    report(f"{CONVERSATIONS} airline conversations, {AT_ONCE} at once, {feed} answers fed back", table_of(results))
    calls, sums, _ = results["kvroute"]
    assert sums["delivered_tokens"] == sum(call.cached_tokens for call in calls)
    assert sums["delivered_tokens"] >= DELIVERED_SHARE_MIN * sums["reachable_tokens"]
    assert sums["delivered_tokens"] > results["round-robin"][1]["delivered_tokens"]


def table_of(results: dict[str, tuple[list[Call], dict[str, Any], float]]) -> Table:
    table = Table("", *results)
    rows = {
        name: [f"{sums[f'{name}_tokens']:,}" for _, sums, _ in results.values()]
        for name in ("prompt", "seen", "reachable", "predicted", "delivered")
    }
    rows["cached, by the client"] = [f"{sum(c.cached_tokens for c in calls):,}" for calls, _, _ in results.values()]
    rows["delivered / reachable"] = [share(sums, "reachable") for _, sums, _ in results.values()]
    rows["hit rate"] = [share(sums, "prompt") for _, sums, _ in results.values()]
    rows["calls by replica"] = [by_replica(calls) for calls, _, _ in results.values()]
    rows["seconds"] = [f"{took_s:.1f}" for _, _, took_s in results.values()]
    for name, cells in rows.items():
        table.add_row(name, *cells)
    return table


def share(sums: dict[str, Any], whole: str) -> str:
    return f"{sums['delivered_tokens'] / max(1, sums[f'{whole}_tokens']):.4f}"


def by_replica(calls: list[Call]) -> str:
    replicas = [call.replica for call in calls]
    return " + ".join(str(replicas.count(replica)) for replica in sorted(set(replicas)))
