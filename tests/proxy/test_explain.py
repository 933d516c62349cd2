"""What a router says about a request that it was only shown."""

from __future__ import annotations

from random import Random
from typing import Any

import aiohttp
import pytest

from kvroute.proxy.app import Service
from kvroute.routing.cost import TERMS
from tests.proxy.harness import closed_port
from tests.proxy.pool import Pool, running_pool, settings

TEXT = "one two three four five six seven eight nine ten " * 20


def chat(text: str = TEXT, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **fields}


async def explain(pool: Pool, body: Any, query: str = "") -> dict[str, Any]:
    status, found = await pool.admin(f"/admin/explain{query}", "POST", json=body)
    assert status == 200, found
    return found


async def test_the_parts_agree_with_each_other():
    """Terms sum to costs, hits and misses to the prompt, and the choice is the first offer."""
    async with running_pool(2) as pool:
        found = await explain(pool, chat())
        assert found["prompt"]["prompts"] == 1
        assert found["prompt"]["read_by"] == "replica"
        assert found["prompt"]["exact"] is True
        assert len(found["offers"]) == 2
        for offer in found["offers"]:
            assert list(offer["terms_s"]) == list(TERMS)
            assert sum(offer["terms_s"].values()) == pytest.approx(offer["cost_s"])
            assert offer["hit_tokens"] + offer["miss_tokens"] == found["prompt"]["tokens"]
            assert offer["is_tied"]
        assert "cost the same" in found["choice"]["why"]
        assert found["admission"]["verdict"] == "goes"


async def test_what_a_replica_holds_makes_it_the_cheapest():
    """After an answer the same prompt is held where it was computed, by whole blocks, and goes there again."""
    async with running_pool(2) as pool:
        await pool.chat(TEXT)
        _, rate = await pool.admin("/admin/hit-rate")
        (warm,) = rate["windows"]["all"]["by_replica"]
        found = await explain(pool, chat())
        held = {row["replica"]: row for row in found["holdings"]}
        size, tokens = found["prompt"]["block_size"], found["prompt"]["tokens"]
        assert held[warm]["blocks"]["GPU"] == tokens // size
        assert held[warm]["hit_tokens"] == (tokens - 1) // size * size
        assert [held[url]["blocks"]["GPU"] for url in pool.urls if url != warm] == [0]
        assert found["choice"] == {"replica": warm, "why": "the cheapest"}
        assert found["offers"][0]["replica"] == warm
        answer = await pool.chat(TEXT)
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == held[warm]["hit_tokens"]


async def test_nothing_is_booked_sent_or_remembered():
    """However often a request is explained, no replica sees it, and the account and every counter stay."""
    async with running_pool(2) as pool:
        await pool.chat("first")
        _, before = await pool.admin("/admin/hit-rate")
        lookups = pool.service.stats.lookups
        for number in range(5):
            await explain(pool, chat(f"{number} {TEXT}"))
            await explain(pool, chat(f"{number} {TEXT}"))
        fresh = await explain(pool, chat(f"0 {TEXT}"))
        assert {row["hit_tokens"] for row in fresh["holdings"]} == {0}
        _, after = await pool.admin("/admin/hit-rate")
        assert after["windows"]["all"] == before["windows"]["all"]
        assert pool.service.stats.lookups == lookups
        assert {promise.requests for promise in pool.service.fleet.promises().values()} == {0}
        await pool.chat(f"0 {TEXT}")
        _, after = await pool.admin("/admin/hit-rate")
        assert after["windows"]["all"]["total"]["seen_tokens"] == 0  # what was explained was not seen


async def test_obstacles_are_named():
    """A drained replica is listed with its reason, and not chosen; where nobody may have it, it is refused."""
    async with running_pool(2) as pool:
        await pool.admin(f"/admin/drain?replica={pool.urls[0]}", "POST")
        found = await explain(pool, chat())
        assert {offer["replica"]: offer["obstacle"] for offer in found["offers"]} == {
            pool.urls[0]: "draining",
            pool.urls[1]: None,
        }
        assert found["choice"]["replica"] == pool.urls[1]
        await pool.admin(f"/admin/drain?replica={pool.urls[1]}", "POST")
        found = await explain(pool, chat())
        assert (found["choice"]["replica"], found["admission"]["verdict"]) == (None, "refused")
        assert found["admission"]["status"] == 503


async def test_a_prompt_that_never_fits_is_refused_as_it_would_be():
    """The offers say why, admission says with which status."""
    async with running_pool(1, kv_tokens=512) as pool:
        found = await explain(pool, chat("word " * 1000))
        assert [offer["obstacle"] for offer in found["offers"]] == ["context too short"]
        assert (found["admission"]["verdict"], found["admission"]["status"]) == ("refused", 400)


async def test_other_routes_tenants_and_priorities():
    """A completion is told by its fields, any route by `path`; tenant and priority are those of the query."""
    async with running_pool(1) as pool:
        found = await explain(pool, {"prompt": ["a b c", "d"]}, "?tenant=acme&priority=5")
        assert (found["prompt"]["kind"], found["prompt"]["prompts"]) == ("completion", 2)
        assert (found["prompt"]["tenant"], found["prompt"]["priority"]) == ("acme", 5)
        found = await explain(pool, {"input": "x" * 400}, "?path=/v1/embeddings")
        assert (found["prompt"]["kind"], found["prompt"]["prompts"], found["prompt"]["exact"]) == ("other", 0, False)


async def test_another_policy_decides_by_itself():
    """Under a baseline the prices are shown, and nobody pretends to know its next choice."""
    async with running_pool(2, routing__policy="round-robin") as pool:
        found = await explain(pool, chat())
        assert found["policy"] == "round-robin"
        assert found["choice"]["replica"] is None
        assert "round-robin decides" in found["choice"]["why"]


@pytest.mark.parametrize(
    ("query", "data", "status", "words"),
    [
        ("", b"{", 400, "not valid JSON"),
        ("?path=/nowhere", b"{}", 400, "/v1/chat/completions"),
        ("?priority=high", b"{}", 400, "`priority`"),
        ("", b'{"model": "other"}', 404, "`other`"),
    ],
)
async def test_refused(query, data, status, words):
    """What cannot be explained is refused in OpenAI's shape."""
    async with running_pool(1) as pool:
        found, body = await pool.admin(f"/admin/explain{query}", "POST", data=data)
        assert found == status
        assert words in body["error"]["message"]


async def test_before_any_replica_was_seen():
    """Nothing can be explained before a replica has said what it serves; it is worth another try."""
    service = Service(settings([f"http://127.0.0.1:{closed_port()}"]))
    await service.start()
    try:
        async with aiohttp.ClientSession() as http, http.post(service.admin_url + "/admin/explain", json=chat()) as it:
            assert it.status == 503
            assert "No replica has been seen" in (await it.json())["error"]["message"]
    finally:
        await service.stop()


async def test_a_request_goes_where_it_was_explained_to_go():
    """One after another, prompts that share beginnings go where they were explained to go, with those hits."""
    rng = Random(7)
    async with running_pool(3) as pool:
        for _ in range(30):
            words = [f"topic {rng.randrange(4)} "] + [
                f"part {rng.randrange(2)} " * 20 for _ in range(rng.randrange(1, 8))
            ]
            body = chat("".join(words), max_tokens=1)
            found = await explain(pool, body)
            async with pool.http.post(pool.service.url + "/v1/chat/completions", json=body) as answer:
                assert answer.headers["x-kvroute-replica"] == found["choice"]["replica"], found
                usage = (await answer.json())["usage"]
            offer = next(offer for offer in found["offers"] if offer["replica"] == found["choice"]["replica"])
            assert usage["prompt_tokens"] == found["prompt"]["tokens"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == offer["hit_tokens"]
