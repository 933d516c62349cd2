"""Policies switched and compared while requests come."""

from __future__ import annotations

import asyncio

import pytest

from kvroute.proxy.policy import merged
from tests.proxy.pool import running_pool
from tests.proxy.test_holds import SMALL, asking, holds, left

TEXT = "one two three four five six seven eight nine ten " * 20


async def test_switching_keeps_what_is_known():
    """Another policy decides from the next request on; back again, the cache is where the index says."""
    async with running_pool(2) as pool:
        first = await pool.chat(TEXT)
        assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        status, state = await pool.admin("/admin/policy", "POST", json={"policy": "round-robin"})
        assert (status, state["policy"]) == (200, "round-robin")
        for _ in range(2):
            await pool.chat(f"other {TEXT}")
        _, rate = await pool.admin("/admin/hit-rate")
        assert len(rate["windows"]["all"]["by_replica"]) == 2
        await pool.admin("/admin/policy", "POST", json={"policy": "kvroute", "ttft_weight": 0.5})
        _, state = await pool.admin("/admin/policy")
        assert (state["policy"], state["ttft_weight"]) == ("kvroute", 0.5)
        again = await pool.chat(TEXT)
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_what_was_held_goes_by_the_new_policy():
    """Requests under way end, and those that wait are placed at once, because round robin holds nobody."""
    async with running_pool(1, **SMALL) as pool:
        first = asking(pool, 0)
        await holds(pool, lambda report: report["live"])
        waiting = asking(pool, 1)
        await holds(pool, lambda report: report["held"])
        await pool.admin("/admin/policy", "POST", json={"policy": "round-robin"})
        report = await holds(pool, lambda report: not report["counts"]["now"])
        assert report["counts"]["placed"] == 1
        assert [promise.requests for promise in pool.service.fleet.promises().values()] == [2]  # the first one goes on
        await asyncio.gather(left(first), left(waiting))


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"policy": "best"}', "round-robin"),
        (b'{"shadow": ["best"]}', "routing.shadow"),
        (b'{"ttft_weight": 2}', "ttft_weight"),
        (b'{"polcy": "random"}', "`policy`, `ttft_weight`, `shadow`"),
        (b"no", "JSON object"),
    ],
)
async def test_an_order_that_cannot_be_followed_changes_nothing(body, words):
    """It is refused with the choices."""
    async with running_pool(1) as pool:
        status, answer = await pool.admin("/admin/policy", "POST", data=body)
        assert (status, answer["error"]["code"], answer["error"]["type"]) == (400, 400, "BadRequestError")
        assert words in answer["error"]["message"]
        _, state = await pool.admin("/admin/policy")
        assert (state["policy"], state["ttft_weight"], state["shadow"]) == ("kvroute", 0.8, [])


async def test_shadows_are_compared_with_what_was_followed():
    """Round robin beside kvroute: the same replica for some, fewer hits, a higher predicted cost, also in metrics."""
    async with running_pool(2, routing__shadow=["round-robin", "lmetric"]) as pool:
        for _ in range(10):
            await pool.chat(TEXT)
        _, report = await pool.admin("/admin/shadow")
        assert report["policy"] == "kvroute"
        robin, lmetric = report["shadows"]
        assert (robin["policy"], robin["placements"], robin["same"]) == ("round-robin", 10, 5)
        assert robin["same_share"] == 0.5
        assert robin["placed"] == dict.fromkeys(pool.urls, 5)
        assert robin["hit_share"] < robin["our_hit_share"]
        assert robin["mean_cost_s"] > robin["our_mean_cost_s"]
        assert lmetric["hit_share"] == lmetric["our_hit_share"]
        _, text = await pool.admin("/metrics")
        assert 'kvroute_shadow_placements_total{policy="round-robin"} 10.0' in text
        assert 'kvroute_shadow_same_total{policy="round-robin"} 5.0' in text
        await pool.admin("/admin/policy", "POST", json={"shadow": []})
        assert (await pool.admin("/admin/shadow"))[1]["shadows"] == []


def test_reports_of_several_processes_add_up():
    """Sums are added and shares made of the sums; a process that has seen nothing changes none."""
    row = {
        "policy": "random", "placements": 2, "same": 1, "prompt_tokens": 100, "cost_s": 3.0, "our_cost_s": 1.0,
        "hit_tokens": 10, "our_hit_tokens": 50, "failures": 0, "placed": {"a": 2},
    }  # fmt: skip
    none = dict.fromkeys(row, 0) | {"policy": "random", "placed": {}}
    one, nothing = ({"policy": "kvroute", "shadows": [each]} for each in (row, none))
    (sums,) = merged([nothing, one, one])["shadows"]
    assert (sums["placements"], sums["same_share"], sums["mean_cost_s"], sums["our_hit_share"]) == (4, 0.5, 1.5, 0.5)
    assert sums["placed"] == {"a": 4}
    assert merged([nothing])["shadows"][0]["same_share"] is None
