"""Choosing, failing, trying elsewhere, and clients that leave; against simulated replicas on real sockets."""

from __future__ import annotations

import asyncio
import json

import aiohttp
import pytest

from kvroute.adapters.upstream import UpstreamSettings
from kvroute.proxy.dispatch import DispatchSettings
from kvroute.routing.demand import Promise
from kvroute.routing.replica import ReplicaId
from tests.adapters.scripted import Turn, scripted
from tests.proxy.harness import Pool, chat, closed_port, pool

CHAT = "/v1/chat/completions"
LONG = "Tell me about prefix caching and paging and all that. " * 40


async def post(it: Pool, **fields: object) -> tuple[int, bytes, str]:
    async with it.session.post(it.url + CHAT, json=chat(**fields)) as answer:
        return answer.status, await answer.read(), answer.headers.get("x-kvroute-replica", "")


async def held(it: Pool, replica: int) -> int:
    """How many blocks the index believes a replica to hold."""
    residency = it.index._members[ReplicaId(it.replicas[replica])][1]
    return len(residency)


async def test_repeated_prompts_go_where_they_are_held():
    """The second turn of a conversation goes to the replica that answered the first, whatever lies between."""
    async with pool(3) as it:
        chosen = [(await post(it, text=f"{topic} {LONG}"))[2] for topic in "abcabcabc"]
        assert chosen[:3] == chosen[3:6] == chosen[6:]
        assert len(set(chosen)) == 3


async def test_burst_of_equal_prompts():
    """Requests of a burst see what was promised to the first ones, before any of them has ended."""
    async with pool(2) as it:
        await asyncio.gather(*(post(it, text=LONG) for _ in range(4)))
        sums = {field: delta for bucket, field, delta in it.account.drain() if bucket == 0}
        assert sums["all|predicted_tokens"] > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["error_before", "abort_empty", "hang", "cut_stream"])
async def test_failure_before_the_first_byte(kind: str, stream: bool):
    """A replica that fails before its first byte is avoided, and another one answers; the client sees nothing of it."""
    async with pool(2, upstream=UpstreamSettings(first_byte_timeout_s=0.5)) as it:
        first = it.replicas.index((await post(it, text=LONG))[2])
        await it.fault(first, kind, **({"after_writes": 0} if kind == "cut_stream" else {}))
        status, body, replica = await post(it, text=LONG, stream=stream)
        assert (status, replica) == (200, it.replicas[1 - first])
        assert b"error" not in body
        assert b"abort" not in body
        assert (it.stats.retries, it.in_flight()) == (1, 0)
        await it.fault(first, "none")


async def test_dead_replica():
    """A replica that cannot be reached is avoided; after a few failures it is not tried any more."""
    async with pool(1) as alive:
        dead = f"http://127.0.0.1:{closed_port()}"
        async with pool(urls=[dead, alive.replicas[0]]) as it:
            found = await asyncio.gather(*(post(it, text=f"{number}") for number in range(12)))
            assert {(status, replica) for status, _, replica in found} == {(200, alive.replicas[0])}
            tried = it.stats.retries
            await post(it, text="once more")
            assert it.stats.retries == tried
            assert it.in_flight() == 0


async def test_everybody_fails():
    """Where all attempts fail, the client gets the last failure, named, and nothing stays booked."""
    async with pool(2) as it:
        for replica in (0, 1):
            await it.fault(replica, "error_before")
        status, body, _ = await post(it)
        assert (status, json.loads(body)["error"]["type"]) == (502, "BadGatewayError")
        assert b"EngineCore encountered an issue" in body
        assert (it.in_flight(), it.stats.requests) == (0, {("failed", 502): 1})


async def test_a_request_that_everybody_answers_with_an_error_blames_nobody():
    """What every replica answers with a 500 is the request's doing: poison must not take the pool from the others."""
    async with pool(2) as it:
        for _ in range(4):
            for replica in (0, 1):
                await it.fault(replica, "error_before", count=1)
            assert (await post(it))[0] == 502
        assert "failed" not in repr(it.fleet)
        assert (await post(it))[0] == 200


async def test_an_error_that_another_replica_does_not_have_is_blamed():
    """A replica that answers with a 500 what another one serves is counted as failing."""
    async with pool(2) as it:
        first = it.replicas.index((await post(it, text=LONG))[2])
        await it.fault(first, "error_before")
        assert (await post(it, text=LONG))[0] == 200
        assert "1 failed" in repr(it.fleet)


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [{"role": "user", "content": [{"type": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": ["text"], "text": "a"}]}]},
        {"messages": [{"role": "assistant", "tool_calls": 5}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": "assistant", "tool_calls": [3]}, {"role": "user", "content": "x"}]},
        {"messages": [{"role": {}, "content": {}}]},
        {"max_tokens": 10**309},
        {"max_completion_tokens": 10**400, "n": 10**400},
        {"n": 10**309},
    ],
    ids=lambda fields: str(fields)[:60],
)
async def test_what_only_the_engine_can_judge_is_the_engines(fields: dict[str, object]):
    """Whatever shape a body has, the router never fails over it: the answer's status is the engine's own."""
    async with pool(1) as it:
        body = chat() | fields
        async with it.session.post(it.replicas[0] + CHAT, json=body) as direct:
            expected = direct.status
        async with it.session.post(it.url + CHAT, json=body) as answer:
            assert answer.status == expected
        assert it.stats.unexpected_errors == 0


async def test_attempts_are_bounded():
    """No more attempts are made than the setting says, however many replicas there are."""
    async with pool(4, dispatch=DispatchSettings(attempts_max=2)) as it:
        for replica in range(4):
            await it.fault(replica, "error_before")
        assert (await post(it))[0] == 502
        assert it.stats.retries == 1


async def test_full_replica_is_not_blamed():
    """A replica that is full is passed over for this request without being counted as failing."""

    async def full(turn: Turn) -> None:
        body = b'{"error":{"message":"The engine is currently busy","type":"Service Unavailable","code":503}}'
        await turn.send(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    async with scripted(full) as busy, pool(1) as alive, pool(urls=[busy.url, alive.replicas[0]]) as it:
        found = [await post(it, text=f"{number}") for number in range(8)]
        assert {(status, replica) for status, _, replica in found} == {(200, alive.replicas[0])}
        assert it.stats.retries >= 1
        assert "failed" not in repr(it.fleet)


async def test_all_are_full():
    """Where every replica is full, the client is told to come back."""

    async def full(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n")

    async with (
        scripted(full) as busy,
        pool(urls=[busy.url]) as it,
        it.session.post(it.url + CHAT, json=chat()) as answer,
    ):
        assert (answer.status, answer.headers["Retry-After"]) == (503, "1")


async def test_failed_prefill_is_taken_back():
    """What a replica was to compute and did not is not believed to be held."""
    async with pool(1) as it:
        await it.fault(0, "error_before", count=1)
        await post(it, text=LONG)
        assert await held(it, 0) == 0
        await post(it, text=LONG)
        assert await held(it, 0) > 20


async def test_refused_request_is_taken_back():
    """A request that the engine refuses leaves nothing in the index."""
    async with pool(1) as it:
        assert (await post(it, text=LONG, temperature=-1))[0] == 400
        assert await held(it, 0) == 0


async def leave_midway(it: Pool, body: dict[str, object], *, after_bytes: bool) -> None:
    """Send a request and close the connection, before or after the first bytes of its answer."""
    async with aiohttp.ClientSession() as session:
        asking = asyncio.ensure_future(session.post(it.url + CHAT, json=body))
        if after_bytes:
            answer = await asking
            await answer.content.readany()
            answer.close()
        else:
            await it.eventually(it.in_flight, "the request is booked")
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)


@pytest.mark.parametrize("stream", [False, True])
async def test_client_that_leaves_before_the_first_byte(stream: bool):
    """A client that leaves in the prefill ends the engine's work; nobody is blamed and nothing stays."""
    async with pool(1, speed=1.0) as it:
        await it.fault(0, "slow", factor=1000.0)
        await leave_midway(it, chat(LONG, stream=stream, max_tokens=500), after_bytes=False)
        await gone(it)
        assert await held(it, 0) == 0


async def test_client_that_leaves_within_a_stream():
    """A client that leaves in the middle of its answer ends the engine's work; the prompt stays in the cache."""
    async with pool(1, speed=1.0) as it:
        await leave_midway(it, chat(LONG, stream=True, max_tokens=5000), after_bytes=True)
        await gone(it)
        assert await held(it, 0) > 20


async def gone(it: Pool) -> None:
    """Wait until an abandoned request has left no trace but its count."""
    await it.eventually(lambda: it.stats.requests == {("abandoned", 499): 1}, "counted as abandoned")
    assert (it.in_flight(), it.stats.active, it.upstream.open_connections) == (0, 0, 0)
    assert "failed" not in repr(it.fleet)

    async def aborted() -> bool:
        state = await it.state(0)
        return (state["aborted"], state["running"], state["waiting"]) == (1, 0, 0)

    await it.eventually(aborted, "the engine has aborted")


async def test_many_clients_leave():
    """A crowd of clients that leave at any time leaves no lease, no task and no connection."""
    async with pool(2, speed=1.0) as it:

        async def visit(number: int) -> None:
            body = chat(f"{number} {LONG}", stream=True, max_tokens=2000)
            asking = asyncio.ensure_future(it.session.post(it.url + CHAT, json=body))
            await asyncio.sleep(0.002 * number)
            if asking.done():
                asking.result().close()
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)

        tasks = len(asyncio.all_tasks())
        await asyncio.gather(*(visit(number) for number in range(60)))
        await it.eventually(lambda: not it.in_flight() and not it.stats.active, "all leases are settled")
        await it.eventually(lambda: not it.upstream.open_connections, "all connections are closed")
        await it.eventually(lambda: len(asyncio.all_tasks()) <= tasks + 4, "all tasks have ended")
        assert "failed" not in repr(it.fleet)


async def test_nobody_is_available():
    """With no replica available a request waits for one, and is served when it comes."""
    async with pool(1, no_replica_wait_s=10.0) as it:
        replica = ReplicaId(it.replicas[0])
        it.fleet.set_health(replica, False)
        asking = asyncio.ensure_future(post(it))
        await it.eventually(lambda: it.stats.held, "the request waits")
        it.fleet.set_health(replica, True)
        it.changed.set()
        assert (await asking)[0] == 200


async def test_nobody_comes():
    """The wait for a replica is bounded; then the client is told to come back."""
    async with pool(1) as it:
        it.fleet.set_draining(ReplicaId(it.replicas[0]), True)
        async with it.session.post(it.url + CHAT, json=chat()) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
        assert it.stats.held == 0


async def test_prompt_too_long():
    """A prompt that no replica could ever hold is refused in the engine's shape, and no replica hears of it."""
    async with pool(1) as it:
        body = {"model": "sim", "prompt": list(range(40_000)), "max_tokens": 5}
        async with it.session.post(f"{it.url}/v1/completions", json=body) as answer:
            assert answer.status == 400
            assert "40000" in (await answer.json())["error"]["message"]
        assert (await it.state(0))["finished"] == 0


async def fill(it: Pool) -> list[ReplicaId]:
    """Book most of every replica's memory, so that further bookings must be confirmed."""
    ids = [ReplicaId(url) for url in it.replicas]
    it.fleet.set_others(dict.fromkeys(ids, Promise(1, 0, 60_000)))
    return ids


async def test_tight_bookings_are_confirmed():
    """Where memory is tight a booking is confirmed in the ledger; a refusal places again elsewhere."""
    async with pool(2) as it:
        ids = await fill(it)
        it.ledger.full = {ids[0]}
        for number in range(4):
            assert (await post(it, text=f"{number}"))[2] == ids[1]
        assert ids[1] in it.ledger.asked
        assert it.in_flight() == 0


async def test_every_booking_is_refused():
    """Where all are full the request goes to the best place all the same: the engine queues it."""
    async with pool(2) as it:
        it.ledger.full = set(await fill(it))
        assert (await post(it))[0] == 200
        assert set(it.ledger.asked) == it.ledger.full
        assert (it.stats.refused_reservations, it.in_flight()) == (2, 0)


async def test_predictions_are_shown_where_configured():
    """Predicted tokens and cost are in the headers only where the setting says so."""
    async with pool(1, dispatch=DispatchSettings(expose_prediction=True)) as it:
        await post(it, text=LONG)
        async with it.session.post(it.url + CHAT, json=chat(LONG)) as answer:
            assert int(answer.headers["x-kvroute-predicted-tokens"]) > 300
            assert float(answer.headers["x-kvroute-cost-s"]) > 0


async def test_prompt_logprobs_predict_nothing():
    """A request whose prompt the engine computes anew whatever it holds is not predicted to hit."""
    async with pool(1, dispatch=DispatchSettings(expose_prediction=True)) as it:
        await post(it, text=LONG)
        async with it.session.post(it.url + CHAT, json=chat(LONG, prompt_logprobs=0)) as answer:
            assert answer.headers["x-kvroute-predicted-tokens"] == "0"


async def test_salts_share_nothing():
    """Prompts under different salts are never predicted to hit each other's blocks."""
    async with pool(1, dispatch=DispatchSettings(expose_prediction=True)) as it:
        predicted = []
        for salt in ("a", "b", "a"):
            async with it.session.post(it.url + CHAT, json=chat(LONG, cache_salt=salt)) as answer:
                predicted.append(int(answer.headers["x-kvroute-predicted-tokens"]))
        assert predicted[:2] == [0, 0]
        assert predicted[2] > 300
