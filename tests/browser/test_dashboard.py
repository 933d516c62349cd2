"""The router's page as a person sees it: in a real browser, before a router with simulated replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import aiohttp
import pytest

from tests.browser.chromium import Page
from tests.chaos.clients import chat
from tests.processes import Router, SimulatedReplica
from tests.proxy.pool import running_pool
from tests.proxy.test_holds import SMALL, asking, holds

TEXT = "one two three four five six seven eight nine ten " * 20
CONTRAST_MIN = 4.5  # WCAG 2.2, level AA, for text of this size

CONTRAST = Path(__file__).with_name("contrast.js").read_text()
FILLED = """[...document.querySelectorAll(".offer .flow")].map((bar) => {
  const parts = [...bar.children].reduce((sum, part) => sum + part.getBoundingClientRect().width, 0);
  return parts / bar.getBoundingClientRect().width;
})"""
CELLS = "[...document.querySelectorAll('#{id} tr')].map((row) => [...row.children].map((cell) => cell.innerText))"


async def cells(tab: Page, table: str) -> list[list[str]]:
    """Return the rows of a table behind its head, once there are any."""
    expression = CELLS.format(id=table)
    await tab.until(f"{expression}.length > 1")
    rows: list[list[str]] = (await tab.value(expression))[1:]
    return rows


async def test_every_section_shows_what_the_router_says(browser: Page):
    """Hits, replicas, live conversations, event streams and shadows are those of the admin endpoints."""
    async with running_pool(2, routing__shadow=["round-robin"]) as pool:
        for _ in range(4):
            await pool.chat(TEXT)
        await browser.open(pool.service.admin_url + "/")
        assert [row[0] for row in await cells(browser, "replicas")] == pool.urls
        assert [row[:2] for row in await cells(browser, "events")] == [[url, "none"] for url in pool.urls]
        assert (await cells(browser, "shadow"))[0][:3] == ["round-robin", "4", "50.0 %"]
        assert len(await cells(browser, "live")) == 1
        _, rate = await pool.admin("/admin/hit-rate")
        share = rate["windows"]["5m"]["total"]["hit_rate"]
        await browser.until(f"at('figures').innerText.includes('{100 * share:.1f} %')")
        assert "2 of 2 replicas healthy" in await browser.value("at('state').innerText")


async def test_replicas_stand_in_the_order_of_the_settings(browser: Page):
    """Whichever answered the router first, every table has them in the same order; a table without rows has no head."""
    async with running_pool(2) as pool:
        await browser.open(pool.service.admin_url + "/")
        await cells(browser, "replicas")
        assert await browser.value("document.querySelectorAll('#live th').length") == 0
        assert await browser.value(
            "[...document.querySelectorAll('#events th')].find((th) => th.innerText === 'lives').title"
        )
        order = await browser.value(
            """(() => {
              const place = { b: 0, a: 1 }, rows = ["a", "b"].map((id) => ({ id }));
              return inOrder(rows, (row) => row.id, place).map((row) => row.id);
            })()"""
        )
        assert order == ["b", "a"]


async def test_hits_on_earlier_answers_hide_no_loss(browser: Page):
    """Of 100 reachable tokens 60 were delivered, and 40 of an answer: 40 are lost, though the sum is 100."""
    async with running_pool(1) as pool:
        await browser.open(pool.service.admin_url + "/")
        await cells(browser, "replicas")
        shown = await browser.value(
            """(() => {
              Object.assign(report.windows[chosen].total, { prompt_tokens: 200, seen_tokens: 120, reachable_tokens: 100,
                known_reachable_tokens: 100, delivered_tokens: 100, generated_tokens: 40 });
              hits();
              return at("key").innerText;
            })()"""
        )
        for words in (
            "from a cache 50.0 %",
            "reachable, not delivered 20.0 %",
            "seen, evicted since 10.0 %",
            "new 20.0 %",
        ):
            assert words in shown


async def test_event_streams_of_a_router_with_workers(browser: Page, tmp_path: Path):
    """Before two processes, too, every section is filled, and a replica whose events are followed is exact."""
    with (
        SimulatedReplica("--kv-events", "tcp://*:0", log=tmp_path / "replica.log") as replica,
        Router(replica.url, log=tmp_path / "router.log", workers=2) as router,
    ):
        async with aiohttp.ClientSession(router.url) as http:
            for _ in range(4):
                async with http.post("/v1/chat/completions", json=chat(TEXT, max_tokens=4)) as answer:
                    assert answer.status == 200
        await browser.open(f"{router.admin}/")
        await cells(browser, "replicas")
        await browser.until("at('events').innerText.includes('exact')")
        batches = "Number([...document.querySelectorAll('#events td')][4].innerText)"
        await browser.until(f"{batches} > 0")  # whichever worker owns the stream
        assert await browser.value("at('policy').innerText") == "kvroute, ttft_weight 0.8"
        await browser.value("at('explain').requestSubmit()")
        await browser.until("document.querySelectorAll('.offer').length === 1")


async def test_a_request_is_explained(browser: Page):
    """The form shows who would get the request and why, and every replica's cost as a bar of its terms."""
    async with running_pool(2) as pool:
        await pool.chat(TEXT)
        await browser.open(pool.service.admin_url + "/")
        await cells(browser, "replicas")
        await browser.value(f"at('body').value = JSON.stringify({{messages: [{{role: 'user', content: {TEXT!r}}}]}})")
        await browser.value("at('explain').requestSubmit()")
        await browser.until("document.querySelectorAll('.offer').length === 2")
        _, rate = await pool.admin("/admin/hit-rate")
        (warm,) = rate["windows"]["all"]["by_replica"]
        assert await browser.value("document.querySelector('.verdict').innerText") == f"{warm}: the cheapest"
        assert (await browser.value("document.querySelector('.offer.chosen').innerText")).startswith(warm)
        cheap, dear = await browser.value(FILLED)
        assert dear == pytest.approx(1, abs=0.01)  # the dearest fills its bar
        _, found = await pool.admin("/admin/explain", "POST", json={"messages": [{"role": "user", "content": TEXT}]})
        costs = [offer["cost_s"] for offer in found["offers"]]
        assert cheap == pytest.approx(costs[0] / costs[1], abs=0.02)


async def test_a_request_that_cannot_be_read_is_answered_in_words(browser: Page):
    """What the router says against it stands where the explanation would."""
    async with running_pool(1) as pool:
        await browser.open(pool.service.admin_url + "/")
        await browser.until("document.readyState === 'complete'")
        await browser.value("at('body').value = '{'")
        await browser.value("at('explain').requestSubmit()")
        await browser.until("at('answer').innerText.includes('not valid JSON')")
        assert [fault for fault in browser.faults if "400" not in fault] == []
        browser.faults.clear()  # a browser logs every answer of 400


async def test_who_waits_is_shown_while_it_waits(browser: Page):
    """A held request has its row, with whose it is and its place in line."""
    async with running_pool(1, **SMALL, tenants__header="x-tenant") as pool:
        tasks = [asking(pool, 0)]
        await holds(pool, lambda report: report["live"])
        await browser.open(pool.service.admin_url + "/")
        await cells(browser, "live")
        tasks += [asking(pool, number, {"x-tenant": f"team-{number}"}) for number in range(1, 9)]
        await browser.until("!at('heldbox').hidden")
        rows = await cells(browser, "held")
        assert {row[0] for row in rows} <= {f"team-{number}" for number in range(1, 9)}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_readable_on_a_phone_in_light_and_dark(browser: Page, scheme: str):
    """At 400 pixels nothing runs out of the page to the side, and every text stands out from what it stands on."""
    async with running_pool(2, routing__shadow=["lmetric"]) as pool:
        for _ in range(3):
            await pool.chat(TEXT)
        await browser.open(pool.service.admin_url + "/", width=400, scheme=scheme)
        await cells(browser, "shadow")
        await browser.value("at('explain').requestSubmit()")
        await browser.until("document.querySelectorAll('.offer').length === 2")
        assert await browser.value("document.documentElement.scrollWidth") <= 400
        assert await browser.value("matchMedia('(prefers-color-scheme: dark)').matches") is (scheme == "dark")
        ratio, where = await browser.value(CONTRAST)
        assert ratio >= CONTRAST_MIN, where


async def test_the_page_asks_nobody_else(browser: Page):
    """No font, script or picture comes from elsewhere: the router may have no way out."""
    async with running_pool(1) as pool:
        await browser.open(pool.service.admin_url + "/")
        await cells(browser, "replicas")
        asked = await browser.value("performance.getEntriesByType('resource').map((entry) => entry.name)")
        assert asked
        assert [url for url in asked if not url.startswith(pool.service.admin_url)] == []
