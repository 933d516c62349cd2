"""The admin listener of a router with two simulated replicas."""

import re

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


async def test_another_sites_page_can_change_nothing():
    """A browser says which site's page sent a request; an order from another site's is refused, reading is not."""
    async with running_pool(1) as pool:
        for path in (f"/admin/drain?replica={pool.urls[0]}", "/admin/policy"):
            for site in ("cross-site", "same-site"):
                assert (await pool.admin(path, "POST", data=b"{}", headers={"Sec-Fetch-Site": site}))[0] == 403
            assert (await pool.admin(path, "POST", data=b"{}", headers={"Sec-Fetch-Site": "same-origin"}))[0] == 200
        assert (await pool.admin("/health", headers={"Sec-Fetch-Site": "cross-site"}))[0] == 200
