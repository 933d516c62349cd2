"""The admin listener of a router with two simulated replicas."""

import asyncio
import re

from kvroute.fake.server import REPLICA
from kvroute.routing.cost import TERMS
from tests.proxy.pool import running_pool


async def test_hit_rate_counts_what_was_delivered():
    """After a repeated prompt, delivered equals what the engine reported, and the losses add up."""
    async with running_pool(2) as pool:
        answers = [await pool.chat("one two three four five six seven eight nine ten " * 20) for _ in range(3)]
        cached = sum(answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers)
        status, report = await pool.admin("/admin/hit-rate")
        assert status == 200
        assert set(report["windows"]) == {"1m", "5m", "1h", "all"}
        total = report["windows"]["1m"]["total"]
        assert (total["requests"], total["delivered_tokens"]) == (3, cached)
        assert total["predicted_tokens"] == cached
        assert total["hit_rate"] == cached / total["prompt_tokens"]
        assert list(report["windows"]["all"]["by_tenant"]) == ["default"]


async def test_health_and_readiness():
    """A router with a healthy replica is healthy and ready."""
    async with running_pool(1) as pool:
        assert (await pool.admin("/health"))[0] == 200
        assert await pool.admin("/ready") == (200, {"ready": True, "available_replicas": 1, "stopping": False})


async def test_drain_and_undrain():
    """A drained replica gets nothing new, and the router is not ready when it was the only one."""
    async with running_pool(2) as pool:
        await pool.admin(f"/admin/drain?replica={pool.urls[0]}", "POST")
        for number in range(4):
            await pool.chat(f"request {number}")
        _, listed = await pool.admin("/admin/replicas")
        rows = {row["id"]: row for row in listed["replicas"]}
        assert rows[pool.urls[0]]["is_draining"]
        _, report = await pool.admin("/admin/hit-rate")
        assert list(report["windows"]["all"]["by_replica"]) == [pool.urls[1]]
        await pool.admin(f"/admin/drain?replica={pool.urls[1]}", "POST")
        assert (await pool.admin("/ready"))[0] == 503
        await pool.admin(f"/admin/undrain?replica={pool.urls[0]}", "POST")
        assert (await pool.admin("/ready"))[0] == 200


async def test_drain_names_the_choices():
    """A replica that is not known is refused with the ones that are."""
    async with running_pool(1) as pool:
        status, body = await pool.admin("/admin/drain?replica=http://nobody", "POST")
        assert status == 404
        assert pool.urls[0] in body["error"]["message"]


async def test_page():
    """The page is served, and every endpoint that it reads answers; tests/browser looks at the page itself."""
    async with running_pool(1) as pool:
        status, page = await pool.admin("/")
        assert status == 200
        names = re.findall(r'"([a-z-]+)"', re.search(r"Promise\.all\(\[(.*?)\]", page)[1])
        assert {"hit-rate", "replicas", "holds", "index", "shadow", "policy"} == set(names)
        assert {(await pool.admin(f"/admin/{name}"))[0] for name in names} == {200}
        assert [term for term in TERMS if f"--{term}: #" not in page] == [], "every term of a cost has a colour"


async def test_another_sites_page_can_change_nothing():
    """A browser says which site's page sent a request; an order from another site's is refused, reading is not."""
    async with running_pool(1) as pool:
        for path in (f"/admin/drain?replica={pool.urls[0]}", "/admin/policy"):
            for site in ("cross-site", "same-site"):
                assert (await pool.admin(path, "POST", data=b"{}", headers={"Sec-Fetch-Site": site}))[0] == 403
            assert (await pool.admin(path, "POST", data=b"{}", headers={"Sec-Fetch-Site": "same-origin"}))[0] == 200
        assert (await pool.admin("/health", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 200


async def test_a_reset_empties_a_replica_and_what_is_known_of_it():
    """The same prompt is a hit, and after the reset neither predicted nor delivered."""
    async with running_pool(1) as pool:
        text = "one two three four five six seven eight nine ten " * 20
        for _ in range(2):
            warm = await pool.chat(text)
        assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
        answer = await pool.admin("/admin/reset", "POST", json={"replica": pool.urls[0]})
        assert answer == (200, {"reset": [pool.urls[0]]})
        before = await totals(pool)
        cold = await pool.chat(text)
        after = await totals(pool)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (after["requests"], after["predicted_tokens"]) == (before["requests"] + 1, before["predicted_tokens"])


async def totals(pool):
    return (await pool.admin("/admin/hit-rate"))[1]["windows"]["all"]["total"]


async def test_a_reset_that_cannot_be_says_why():
    """An unknown replica, a body that is no order, and an engine that is not in development mode."""
    async with running_pool(1) as pool:
        (runner, url), path = pool.replicas[0], "/admin/reset"
        for order, status, words in (
            ({"replica": "http://nobody"}, 404, url),
            ({"url": url}, 400, '{"replica": ID}'),
        ):
            answer = await pool.admin(path, "POST", json=order)
            assert (answer[0], words in answer[1]["error"]["message"]) == (status, True)
        replica = runner.app[REPLICA]
        replica.driver.slowdown = 1000.0
        async with asyncio.TaskGroup() as group:
            busy = group.create_task(pool.chat("still busy", max_tokens=50))
            while not replica.driver.replica.running_count:
                await asyncio.sleep(0.01)
            status, answer = await pool.admin(path, "POST", json={"replica": url})
            replica.driver.slowdown = 1.0
            assert (status, "drain it first" in answer["error"]["message"]) == (502, True)
        assert busy.result()["choices"]
    async with running_pool(1, dev_mode=False) as pool:
        status, answer = await pool.admin(path, "POST", json={"replica": pool.urls[0]})
        assert (status, "VLLM_SERVER_DEV_MODE=1" in answer["error"]["message"]) == (502, True)


async def test_a_replica_that_sleeps_gets_nothing_and_wakes_with_an_empty_cache():
    """As its metrics say; what it gave up for its sleep is not predicted afterwards."""
    async with running_pool(2) as pool:
        text = "one two three four five six seven eight nine ten " * 20
        for _ in range(2):
            await pool.chat(text)
        _, report = await pool.admin("/admin/hit-rate")
        (holder,) = report["windows"]["all"]["by_replica"]
        async with pool.http.post(f"{holder}/sleep?level=1") as answer:
            assert answer.status == 200
        await available(pool, {holder: False})
        for _ in range(2):
            await pool.chat(text)
        async with pool.http.post(f"{holder}/wake_up"):
            await available(pool, {holder: True})
        for url in set(pool.urls) - {holder}:
            await pool.admin(f"/admin/drain?replica={url}", "POST")
        before = await totals(pool)
        cold = await pool.chat(text)
        assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert (await totals(pool))["predicted_tokens"] == before["predicted_tokens"]


async def available(pool, expected):
    """Wait until the router says so of the replicas."""
    async with asyncio.timeout(15):
        while True:
            rows = (await pool.admin("/admin/replicas"))[1]["replicas"]
            if expected.items() <= {row["id"]: row["is_available"] for row in rows}.items():
                return
            await asyncio.sleep(0.02)
