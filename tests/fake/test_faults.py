"""A replica breaks in each of the ways it can be told to."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

PROMPT = {"prompt": "Hello there", "max_tokens": 20, "ignore_eos": True}
STREAM = PROMPT | {"stream": True}


async def order(session, kind, **fields):
    async with session.post("/_fault", json={"kind": kind, **fields}) as response:
        assert response.status == 200, await response.text()


async def post(session, body=STREAM):
    async with session.post("/v1/completions", json=body) as response:
        return response.status, await response.text()


@pytest.fixture
async def session(serve):
    return await serve(faults=True)


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_error_before_the_first_byte(session, body):
    """The next `count` requests get 500 in the engine's words, and those after them an answer."""
    await order(session, "error_before", count=2)
    answers = [await post(session, body) for _ in range(3)]
    assert [status for status, _ in answers] == [500, 500, 200]
    assert json.loads(answers[0][1])["error"]["type"] == "InternalServerError"


async def test_error_inside_a_stream(session):
    """A stream under status 200 ends with an error event and the end mark."""
    await order(session, "error_after")
    status, text = await post(session)
    *events, failure, done = text.strip().split("\n\n")
    assert (status, done) == (200, "data: [DONE]")
    assert events
    assert json.loads(failure.removeprefix("data: "))["error"]["code"] == 500


async def test_error_instead_of_any_event(session):
    """With no writes left, the error is the first event."""
    await order(session, "error_after", after_writes=0)
    assert (await post(session))[1].startswith('data: {"error":')


@pytest.mark.parametrize("body", [PROMPT, STREAM])
async def test_a_cut_connection(session, body):
    """The connection ends without the end of the answer."""
    await order(session, "cut_stream")
    with pytest.raises(aiohttp.ClientError):
        await post(session, body)


async def test_abort_with_an_empty_text(session):
    """The answer is 200, empty, and says that it was aborted."""
    await order(session, "abort_empty")
    choice = json.loads((await post(session, PROMPT))[1])["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("", "abort")
    assert '"text":"","logprobs":null,"finish_reason":"abort"' in (await post(session))[1]


async def test_a_stream_that_falls_silent(session):
    """The stream begins, stays open and says nothing more."""
    await order(session, "silent_stream")
    async with session.post("/v1/completions", json=STREAM) as response:
        assert (await response.content.readline()).startswith(b"data: ")
        with pytest.raises(asyncio.TimeoutError):
            async with asyncio.timeout(0.3):
                await response.read()


async def test_an_engine_that_hangs_looks_healthy_and_goes_on_later(session):
    """While it hangs nothing is answered and probes are green; afterwards the request is answered after all."""
    await order(session, "hang")
    asked = asyncio.ensure_future(post(session))
    await asyncio.sleep(0.2)
    async with session.get("/health") as response:
        assert (response.status, asked.done()) == (200, False)
    await order(session, "none")
    assert (await asked)[0] == 200


async def test_a_slow_engine_answers_later_but_in_full(session):
    """Slowness changes when, not what."""
    whole = await post(session, PROMPT)
    await order(session, "slow", factor=3)
    slow = await post(session, PROMPT)
    assert json.loads(slow[1])["choices"] == json.loads(whole[1])["choices"]


@pytest.mark.parametrize(
    "fault",
    [{"kind": "nonsense"}, {"kind": "slow", "factor": 0}, {"kind": "slow", "count": 0}, {"kind": "slow", "x": 1}],
)
async def test_an_order_that_makes_no_sense_is_refused(session, fault):
    """The error lists the kinds there are."""
    async with session.post("/_fault", json=fault) as response:
        assert response.status == 400
        assert "error_before" in (await response.json())["error"]["message"]


async def test_without_faults_nobody_can_order_any(serve):
    """The route is there only where the replica was started for it."""
    async with (await serve()).post("/_fault", json={"kind": "crash"}) as response:
        assert response.status == 404


async def scraped(session):
    async with session.get("/metrics") as response:
        return await response.text()


async def test_metrics_that_stall(session):
    """A scrape is not answered; afterwards it is."""
    await order(session, "metrics_stall")
    with pytest.raises(asyncio.TimeoutError):
        async with asyncio.timeout(0.2):
            await scraped(session)
    await order(session, "none")
    assert "vllm:num_requests_running" in await scraped(session)


async def test_metrics_that_are_frozen(session):
    """They go on showing what was; requests are answered meanwhile."""
    before = await scraped(session)
    await order(session, "metrics_freeze")
    assert (await post(session))[0] == 200
    assert await scraped(session) == before
    await order(session, "none")
    assert "vllm:generation_tokens_total{" in before
    assert await scraped(session) != before


async def asleep(session):
    async with session.get("/is_sleeping") as response:
        return (await response.json())["is_sleeping"]


async def test_a_sleeping_engine_aborts_forgets_and_lets_requests_wait(session):
    """What is under way ends with "abort", the cache is empty, and who comes meanwhile is answered after the waking."""
    body = PROMPT | {"prompt": [5] * 40}
    await post(session, body)
    running = asyncio.ensure_future(post(session, body | {"max_tokens": 4000}))
    await asyncio.sleep(0.05)
    async with session.post("/sleep", params={"level": 1}) as response:
        assert await response.json() == {"status": "sleeping", "level": 1}
    assert json.loads((await running)[1])["choices"][0]["finish_reason"] == "abort"
    waiting = asyncio.ensure_future(post(session, body))
    await asyncio.sleep(0.1)
    assert (waiting.done(), await asleep(session)) == (False, True)
    async with session.post("/wake_up") as response:
        assert await response.json() == {"status": "awake", "tags": None}
    usage = json.loads((await waiting)[1])["usage"]
    assert (usage["prompt_tokens_details"]["cached_tokens"], await asleep(session)) == (0, False)


async def test_a_paused_engine_goes_on_where_it_was(session):
    """Level 0 with mode "keep" aborts nothing and forgets nothing."""
    body = PROMPT | {"prompt": [5] * 40}
    await post(session, body)
    async with session.post("/sleep", params={"level": 0, "mode": "keep"}) as response:
        assert response.status == 200
    waiting = asyncio.ensure_future(post(session, body))
    await asyncio.sleep(0.1)
    assert not waiting.done()
    await session.post("/wake_up")
    assert json.loads((await waiting)[1])["usage"]["prompt_tokens_details"]["cached_tokens"] == 32


@pytest.mark.parametrize("params", [{"level": "3"}, {"mode": "wait"}])
async def test_sleeping_in_another_way_is_refused(session, params):
    """The error names the parameter."""
    async with session.post("/sleep", params=params) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == next(iter(params))
