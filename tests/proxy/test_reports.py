"""Replicas of which events were lost are asked to tell again what requests find there."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from kvroute.adapters.replica_client import ReplicaClient
from kvroute.kv.events import REPORT_SESSION
from kvroute.proxy import reports
from kvroute.proxy.reports import BODY_BYTES_MAX, Reporter, names_sessions, probe_of
from kvroute.routing.replica import Replica, ReplicaId
from tests.proxy.test_followers import BLOCK, prompt, rig, serving
from tests.redis_servers import until


def test_the_prompt_stays_and_the_answer_is_short():
    """A question has what makes the prompt, for one token, without what a client wanted of the answer."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": [{}], "cache_salt": "s"}
    asked = msgspec.json.decode(
        probe_of(msgspec.json.encode(body | {"stream": True, "n": 3, "max_completion_tokens": 9, "prompt_logprobs": 1}))
    )
    ours = {"max_tokens": 1, "session_id": REPORT_SESSION, "vllm_xargs": {"kv_cache_report_mode": "full"}}
    assert asked == body | ours


def test_the_prompt_is_sent_again_byte_for_byte():
    """What makes the prompt is not read, so that no number and no text of it becomes another."""
    body = b'{"prompt": [1, 99999999999999999999], "stop": 5, "chat_template": "\\u00e4 x", "cache_salt" : 1.50 }'
    assert probe_of(body).startswith(
        b'{"prompt":[1, 99999999999999999999],"chat_template":"\\u00e4 x","cache_salt":1.50,"max_tokens":1'
    )


@pytest.mark.parametrize("body", [b"", b"[]", b"{", b"\xff", b"[" * 100_000])
def test_what_cannot_be_repeated_is_not(body):
    """A body that is no object is not sent again."""
    assert probe_of(body) is None


@pytest.mark.parametrize(
    ("version", "names"),
    [("0.30.0", True), ("0.32.1+cpu", True), ("1.0.0", True), ("0.29.9", False), ("0.9.2", False), ("dev", False)],
)
def test_releases_that_name_sessions(version, names):
    """Only releases whose events name sessions are asked: of others what is told twice would count twice."""
    assert names_sessions(msgspec.json.encode({"version": version})) is names


class Asked:
    """A replica that counts what it is asked, and answers when it is let."""

    def __init__(self, version: str = "0.32.0") -> None:
        self.version, self.bodies, self.may = version, list[dict[str, Any]](), asyncio.Event()
        self.may.set()
        self.status = 200
        self.app = web.Application()
        self.app.router.add_get("/version", self._version)
        self.app.router.add_post("/v1/completions", self._answer)

    async def _version(self, _request: web.Request) -> web.Response:
        return web.json_response({"version": self.version} if self.status == 200 else {}, status=self.status)

    async def _answer(self, request: web.Request) -> web.Response:
        self.bodies.append(await request.json())
        await self.may.wait()
        return web.json_response({})


async def test_one_question_at_a_time():
    """While a replica has not answered it is not asked again, nor for paths and bodies that are not to be repeated."""
    one = Asked()
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, client = Reporter(), ReplicaClient(session, url, None, 5.0)
        replica = Replica(id=ReplicaId(url), url=url)
        one.may.clear()
        reporter.ask(client, replica, "/v1/responses", b"{}")
        reporter.ask(client, replica, "/v1/completions", b" " * (BODY_BYTES_MAX + 1))
        for number in range(3):
            reporter.ask(client, replica, "/v1/completions", b'{"prompt": [%d]}' % number)
        await until(lambda: bool(one.bodies))
        one.may.set()
        await until(lambda: not reporter._tasks)
        reporter.ask(client, replica, "/v1/completions", b'{"prompt": [9]}')
        await until(lambda: len(one.bodies) == 2)
        assert [body["prompt"] for body in one.bodies] == [[0], [9]]
        await reporter.close()


async def test_an_old_release_is_not_asked():
    """It is asked for its version once, until it restarts."""
    one = Asked("0.28.0")
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, client = Reporter(), ReplicaClient(session, url, None, 5.0)
        replica = Replica(id=ReplicaId(url), url=url)
        for _ in range(2):
            reporter.ask(client, replica, "/v1/completions", b"{}")
            await until(lambda: not reporter._tasks)
        one.version = "0.30.0"
        reporter.ask(client, replica, "/v1/completions", b"{}")
        assert not reporter._tasks
        reporter.forget(replica.id)
        reporter.ask(client, replica, "/v1/completions", b"{}")
        await until(lambda: len(one.bodies) == 1)
        await reporter.close()


async def test_what_broke_off_is_asked_again():
    """A question that got no answer is none that was asked."""
    one = Asked()
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, replica = Reporter(), Replica(id=ReplicaId(url), url=url)
        dead, client = ReplicaClient(session, "http://127.0.0.1:1", None, 5.0), ReplicaClient(session, url, None, 5.0)
        reporter.ask(dead, replica, "/v1/completions", b"{}")
        await until(lambda: not reporter._tasks)
        reporter.ask(client, replica, "/v1/completions", b"{}")
        await until(lambda: len(one.bodies) == 1)
        await reporter.close()


async def test_the_same_is_asked_again_after_a_while(monkeypatch):
    """An answer may have been lost as the events were, and the next loss makes doubtful what was certain."""
    one = Asked()
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, client = Reporter(), ReplicaClient(session, url, None, 5.0)
        replica = Replica(id=ReplicaId(url), url=url)

        async def ask() -> int:
            reporter.ask(client, replica, "/v1/completions", b"{}")
            await until(lambda: not reporter._tasks)
            return len(one.bodies)

        assert [await ask(), await ask()] == [1, 1]
        monkeypatch.setattr(reports, "RECENT_S", 0.1)
        assert [await ask(), await ask()] == [2, 3]
        await reporter.close()


async def test_who_does_not_say_its_release_is_asked_for_it_again():
    """A replica that is just starting has not said that it is an old one."""
    one = Asked()
    one.status = 503
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, client = Reporter(), ReplicaClient(session, url, None, 5.0)
        replica = Replica(id=ReplicaId(url), url=url)
        for status in (503, 200):
            one.status = status
            reporter.ask(client, replica, "/v1/completions", b"{}")
            await until(lambda: not reporter._tasks)
        assert len(one.bodies) == 1
        await reporter.close()


async def test_a_question_ends_with_the_replica_s_life():
    """What a replica was asked before it restarted says nothing of the one that is there now."""
    one = Asked()
    async with serving(one.app) as url, aiohttp.ClientSession() as session:
        reporter, client = Reporter(), ReplicaClient(session, url, None, 600.0)
        replica = Replica(id=ReplicaId(url), url=url)
        one.may.clear()
        reporter.ask(client, replica, "/v1/completions", b"{}")
        await until(lambda: bool(one.bodies))
        reporter.forget(replica.id)
        await until(lambda: not reporter._tasks)
        one.may.set()
        reporter.ask(client, replica, "/v1/completions", b"{}")
        await until(lambda: len(one.bodies) == 2)
        await reporter.close()


@pytest.mark.parametrize(("kind", "missed"), [("memory", 0), ("memory", 2), ("redis", 2)])
async def test_after_lost_events_what_is_used_is_certain_again(kind, missed):
    """Batches are lost for good, the first ones or later ones: what requests find after that is named by the engine,
    nothing of it stays in doubt, and its removal is understood."""
    async with rig(1, kv_tokens=2048, replays=False, **{"store.kind": kind}) as it:
        (feed,) = it.service.feeds.followers.feeds.values()

        async def is_heard() -> bool:  # without replay, what is published before the router listens is not
            await it.complete(prompt(0, blocks=next(more)))
            return feed.counters.batches > 0

        more = itertools.count(8)
        if missed:
            await it.fault(0, "lose_events", count=missed)
        await until(is_heard)
        await it.events_are("exact")
        await it.fault(0, "lose_events", count=4)
        for number in range(1, 6):
            await it.complete(prompt(number))

        async def is_certain() -> bool:
            for number in range(4):
                assert (await it.complete(prompt(number)))[0] == 8 * BLOCK
            return feed.counters.gaps > 0 and feed.table.counters.learnt > 0 and not feed.table.suspects

        await until(is_certain)
        assert it.service.feeds.reporter.asked > 0
        assert feed.table.counters.unknown_removals == 0
        for number in range(10, 40):
            await it.complete(prompt(number))
        await until(lambda: feed.table.counters.removed > 12 * 8)
        unasked = 8 + next(more) - 9  # the one lost prompt, and what was first asked beyond its eight blocks
        assert feed.table.counters.unknown_removals <= unasked
