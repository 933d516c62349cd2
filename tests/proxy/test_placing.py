"""Every wait for a lease ends: by room, by a refusal, by the client's leaving, by its bound."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from typing import Any

from kvroute.kv.prompt import ChatPrompt
from kvroute.proxy.dispatch import DispatchSettings
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.replica import ReplicaId
from tests.proxy.harness import BLOCK_SIZE, MODEL, Pool, chat, pool

SMALL_TOKENS = 640  # a cache that one of these answers nearly fills


def settings(**fields: float) -> AdmissionSettings:
    return AdmissionSettings(**fields)  # type: ignore[arg-type]


Answer = tuple[int, dict[str, str], dict[str, Any]]


def asking(it: Pool, number: int) -> asyncio.Task[Answer]:
    """Send a chat that no other one begins like."""

    async def ask() -> Answer:
        body = chat(f"{number} " * 40, max_tokens=400)
        async with it.session.post(it.url + "/v1/chat/completions", json=body) as answer:
            return answer.status, dict(answer.headers), await answer.json()

    return asyncio.ensure_future(ask())


async def cancelled(tasks: Iterable[asyncio.Task[Answer]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_what_does_not_fit_waits_and_is_served():
    """More long answers than the cache holds: some wait at the router, all are answered, and no engine preempts."""
    async with pool(1, admission=settings(), kv_tokens=SMALL_TOKENS) as it:
        tasks = [asking(it, number) for number in range(4)]
        await it.eventually(lambda: it.stats.held, "a request is held")
        answers = await asyncio.gather(*tasks)
        assert [answer[0] for answer in answers] == [200] * 4
        assert not it.stats.held
        assert not it.in_flight()


async def test_a_held_request_goes_by_what_is_cached_then():
    """Its prompt comes into the cache while a request waits: it is placed as a hit, although it was none before."""
    dispatch = DispatchSettings(expose_prediction=True)
    async with pool(1, admission=settings(), kv_tokens=SMALL_TOKENS, dispatch=dispatch, speed=5.0) as it:
        others = [asking(it, number) for number in range(2)]
        await it.eventually(lambda: it.stats.held, "somebody waits")
        last = asking(it, 9)
        await it.eventually(lambda: it.stats.held == 2, "the last one waits, too")
        served = it.catalogue.find(MODEL)
        prompt = await served.entry.reader.read(
            ChatPrompt(chat(f"{9} " * 40)["messages"]), block_size=BLOCK_SIZE, root=served.root(None)
        )
        assert prompt.hit_limit_blocks
        it.index.record(ReplicaId(it.replicas[0]), prompt.chain)
        for task in others:
            task.cancel()
        status, head, _ = await last
        predicted = int(head["x-kvroute-predicted-tokens"])
        assert (status, predicted) == (200, prompt.hit_limit_blocks * BLOCK_SIZE)
        await cancelled(others)


async def test_a_held_request_whose_client_leaves_is_forgotten():
    """A client that leaves while it waits leaves nothing behind."""
    async with pool(1, admission=settings(), kv_tokens=SMALL_TOKENS, speed=5.0) as it:
        tasks = [asking(it, number) for number in range(4)]
        await it.eventually(lambda: it.stats.held, "somebody waits")
        await cancelled(tasks)
        await it.eventually(lambda: not it.stats.held, "nobody waits any more")
        await it.eventually(lambda: not it.in_flight(), "no lease is left")


async def test_a_wait_that_is_too_long_ends_with_429():
    """A request that was held for its bound is refused, and told when to come again."""
    async with pool(1, admission=settings(hold_s=0.2), kv_tokens=SMALL_TOKENS, speed=1.0) as it:
        tasks = [asking(it, number) for number in range(4)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        status, head, body = done.pop().result()
        assert status == 429
        assert int(head["Retry-After"]) >= 1
        assert "no memory" in body["error"]["message"]
        await cancelled(waiting)


async def test_no_more_are_held_than_may_be():
    """Beyond the bound of held requests the next is refused at once."""
    async with pool(1, admission=settings(holds_max=1), kv_tokens=SMALL_TOKENS, speed=1.0) as it:
        tasks = [asking(it, number) for number in range(4)]
        done, waiting = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        assert {task.result()[0] for task in done} == {429}
        await cancelled(waiting)


async def streamed(it: Pool, number: int, **fields: object) -> tuple[int, str]:
    """Send a chat whose answer comes event by event; return its status and all that was sent."""
    body = chat(f"{number} " * 40, stream=True, **{"max_tokens": 400, **fields})
    async with it.session.post(it.url + "/v1/chat/completions", json=body) as answer:
        return answer.status, (await answer.read()).decode()


async def test_who_waits_for_a_stream_is_sent_comments():
    """A held client hears comments, then its own answer, whole; one that is not held hears none."""
    told = DispatchSettings(waiting_comment_s=0.05)
    async with pool(1, admission=settings(), kv_tokens=SMALL_TOKENS, dispatch=told, speed=20.0) as it:
        answers = await asyncio.gather(*[streamed(it, number) for number in range(3)])
        assert [status for status, _ in answers] == [200] * 3
        waited = [text for _, text in answers if text.startswith(": waiting\n\n")]
        assert 1 <= len(waited) < 3
        for _, text in answers:
            events = text.replace(": waiting\n\n", "")
            assert events.startswith("data: {")
            assert events.endswith("data: [DONE]\n\n")
            assert ": waiting" not in events


async def test_what_fails_after_a_comment_is_told_as_an_event():
    """The status is out: a hold that takes too long, and what the engine refuses, become events with the same error."""
    told = DispatchSettings(waiting_comment_s=0.05)
    async with pool(1, admission=settings(hold_s=0.4), kv_tokens=SMALL_TOKENS, dispatch=told, speed=1.0) as it:
        first = asking(it, 0)
        await it.eventually(it.in_flight, "the first one is placed")
        status, text = await streamed(it, 1)
        *comments, event = text.rstrip("\n").split("\n\n")
        assert (status, set(comments)) == (200, {": waiting"})
        error = json.loads(event.removeprefix("data: "))["error"]
        assert (error["code"], error["type"]) == (429, "RateLimitError")
        await cancelled([first])
    async with pool(1, admission=settings(), kv_tokens=SMALL_TOKENS, dispatch=told, speed=20.0) as it:
        first = asking(it, 0)
        await it.eventually(it.in_flight, "the first one is placed")
        status, text = await streamed(it, 1, temperature=-5)
        *comments, event = text.rstrip("\n").split("\n\n")
        assert (status, set(comments)) == (200, {": waiting"})
        assert json.loads(event.removeprefix("data: "))["error"]["code"] == 400
        assert (await first)[0] == 200


async def test_a_comment_does_not_end_trying_elsewhere():
    """No byte of an engine has gone out: a replica that breaks before its first event is replaced by another."""
    told = DispatchSettings(waiting_comment_s=0.05)
    async with pool(2, admission=settings(), kv_tokens=SMALL_TOKENS, dispatch=told, speed=2.0) as it:
        first = asking(it, 0)
        await it.eventually(it.in_flight, "the first one is placed")
        (taken,) = [url for url, promise in it.fleet.promises().items() if promise.requests]
        second = asking(it, 1)
        await it.eventually(lambda: it.in_flight() == 2, "both replicas are taken")
        last = asyncio.ensure_future(streamed(it, 9, max_tokens=300))
        await it.eventually(lambda: it.stats.held, "the last one waits")
        await it.fault(it.replicas.index(taken), "error_before", count=1)
        await cancelled([first])
        await it.eventually(lambda: it.stats.retries == 1, "it was sent to the free replica, which broke")
        status, text = await last
        assert (status, (await second)[0]) == (200, 200)
        assert text.startswith(": waiting\n\n")
        assert text.endswith("data: [DONE]\n\n")
