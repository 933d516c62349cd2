"""The routes of a simulated replica and what each does."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import orjson
from aiohttp import web

from kvroute.errors import BadRequest
from kvroute.fake import openai, requests, text
from kvroute.fake.answers import Performance, Studio
from kvroute.fake.driver import Driver
from kvroute.fake.faults import ConnectionCut, EngineDied, Fault, Faults, Kind, spoil, strike
from kvroute.fake.metrics import ReplicaMetrics

VERSION = "0.32.0"  # of the vLLM whose answers these are modelled on


class Replica:
    """The handlers and what they share."""

    def __init__(self, driver: Driver, model: requests.Model, seed: int) -> None:
        self.driver = driver
        self.model = model
        self.faults = Faults(driver)
        self.metrics = ReplicaMetrics(driver, model.name)
        self.is_dying = False  # the engine is gone, and the server not yet
        self._frozen = b""  # metrics at the time when they were frozen
        self._studio = Studio(driver, model, seed)
        self._created = int(time.time())

    def routes(self, *, with_faults: bool) -> list[web.RouteDef]:
        """List what is served."""
        found = [
            web.get("/health", self.health),
            web.get("/ping", self.health),
            web.post("/ping", self.health),
            web.get("/version", self.version),
            web.get("/metrics", self.exposition),
            web.get("/v1/models", self.models),
            web.post("/v1/chat/completions", self.chat),
            web.post("/v1/completions", self.completion),
            web.post("/tokenize", self.tokenize),
            web.post("/detokenize", self.detokenize),
            web.get("/kv_event_sources", self.kv_event_sources),
            web.post("/reset_prefix_cache", self.reset_prefix_cache),
            web.post("/sleep", self.sleep),
            web.post("/wake_up", self.wake_up),
            web.get("/is_sleeping", self.is_sleeping),
            web.get("/_state", self.state),
        ]
        return [*found, web.post("/_fault", self.fault)] if with_faults else found

    async def health(self, _request: web.Request) -> web.Response:
        """Say that the server is there, whatever its engine does."""
        return web.Response()

    async def version(self, _request: web.Request) -> web.Response:
        """Name the vLLM whose surface this is."""
        return json_response({"version": VERSION})

    async def exposition(self, _request: web.Request) -> web.Response:
        """Write the metrics, unless a fault is in the way."""
        content_type = "text/plain; version=0.0.4; charset=utf-8"
        if self.faults.kind is Kind.METRICS_STALL:
            await asyncio.Event().wait()  # until the client leaves, which cancels us
        text = self._frozen if self.faults.kind is Kind.METRICS_FREEZE else self.metrics.exposition()
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def models(self, _request: web.Request) -> web.Response:
        """List the one model."""
        return json_response(openai.models(self.model.name, self.model.max_model_len, self._created))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        """Answer a conversation."""
        body = requests.body_of(request.content_type, await request.read())
        return await self._answer(request, requests.chat(_with_session(body, request), self.model))

    async def completion(self, request: web.Request) -> web.StreamResponse:
        """Continue one or several texts."""
        body = requests.body_of(request.content_type, await request.read())
        return await self._answer(request, requests.completion(_with_session(body, request), self.model))

    async def tokenize(self, request: web.Request) -> web.Response:
        """Tokenise a text, or a conversation exactly as `chat` does."""
        body = requests.body_of(request.content_type, await request.read())
        requests.check_model(body, self.model)
        ids = text.ids_of(requests.tokens_to_show(body))
        strings = [text.piece_of(token) for token in ids] if body.get("return_token_strs") else None
        shown = {"count": len(ids), "max_model_len": self.model.max_model_len, "tokens": list(ids)}
        return json_response(shown | {"token_strs": strings})

    async def detokenize(self, request: web.Request) -> web.Response:
        """Give the text of token ids."""
        body = requests.body_of(request.content_type, await request.read())
        requests.check_model(body, self.model)
        return json_response({"prompt": text.decode(requests.token_ids(body.get("tokens"), "tokens"))})

    async def reset_prefix_cache(self, _request: web.Request) -> web.Response:
        """Empty the cache, unless requests are using it."""
        return json_response({"success": self.driver.replica.pool.reset()})

    async def kv_event_sources(self, _request: web.Request) -> web.Response:
        """List the publishers, by rank: none, or one."""
        feed = self.driver.feed
        return json_response({} if feed is None else {"0": msgspec.to_builtins(feed.publisher.config)})

    async def sleep(self, request: web.Request) -> web.Response:
        """Stop the engine; requests wait until it is woken. Level 1 and 2 empty the cache. Modes: abort, keep."""
        level, mode = request.query.get("level", "1"), request.query.get("mode", "abort")
        if level not in ("0", "1", "2"):
            raise requests.refused("level must be 0, 1 or 2", "level", level)
        if mode not in ("abort", "keep"):
            raise requests.refused("mode must be abort or keep; a simulated replica cannot wait", "mode", mode)
        self.driver.sleep(int(level), is_abrupt=mode == "abort")
        return json_response({"status": "sleeping", "level": int(level)})

    async def wake_up(self, request: web.Request) -> web.Response:
        """Go on after a sleep."""
        self.driver.wake()
        return json_response({"status": "awake", "tags": request.query.getall("tags", []) or None})

    async def is_sleeping(self, _request: web.Request) -> web.Response:
        """Say whether the engine sleeps."""
        return json_response({"is_sleeping": self.driver.is_sleeping})

    async def state(self, _request: web.Request) -> web.Response:
        """Say what the engine is doing, for tests."""
        replica, counters = self.driver.replica, self.driver.replica.counters
        return json_response(
            {
                "running": replica.running_count,
                "waiting": replica.waiting_count,
                "aborted": counters.aborted,
                "finished": counters.finished,
                "used_blocks": replica.pool.usable_blocks - replica.pool.free_blocks,
            }
        )

    async def fault(self, request: web.Request) -> web.Response:
        """Take an order to break."""
        try:
            order = msgspec.json.decode(await request.read(), type=Fault)
        except msgspec.DecodeError as problem:
            kinds = ", ".join(kind.value for kind in Kind)
            raise BadRequest(f"not a fault: {problem}. Kinds: {kinds}") from None
        if order.kind is Kind.METRICS_FREEZE:
            self._frozen = self.metrics.exposition()
        self.faults.order(order)
        return json_response({"kind": order.kind.value})

    async def _answer(self, request: web.Request, ask: requests.Ask) -> web.StreamResponse:
        fault = self.faults.take()
        if self.is_dying or (fault is not None and fault.kind is Kind.ERROR_BEFORE):
            raise EngineDied
        performance = self._studio.begin(ask)
        try:
            if fault is not None and fault.kind is Kind.ABORT_EMPTY:
                self.driver.give_up(performance.job)
            reply = self._reply(request, ask)
            if ask.is_stream:
                return await self._stream(request, reply, performance, fault)
            return await self._whole(request, reply, performance, fault)
        finally:
            self.driver.abort(performance.job)

    def _reply(self, request: web.Request, ask: requests.Ask) -> openai.Reply:
        name = request.headers.get("X-Request-Id") or uuid.uuid4().hex[:16]
        prefix = "chatcmpl" if ask.is_chat else "cmpl"
        return openai.Reply(f"{prefix}-{name}", int(time.time()), self.model.name, ask.is_chat)

    async def _whole(
        self, request: web.Request, reply: openai.Reply, performance: Performance, fault: Fault | None
    ) -> web.Response:
        async for _ in performance.deltas():
            pass
        if fault is not None:
            try:
                await strike(fault)
            except ConnectionCut:
                _cut(request)
        choices = performance.whole()
        self._count(choices)
        return json_response(openai.whole(reply, choices, performance.count()))

    async def _stream(
        self, request: web.Request, reply: openai.Reply, performance: Performance, fault: Fault | None
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        await response.write(b"")  # the headers go out before the first token is there
        try:
            async for events in spoil(self._events(reply, performance), fault):
                await response.write(b"".join(events))
        except EngineDied as failure:
            await response.write(openai.event(openai.error(failure)))
        except ConnectionCut:
            _cut(request)
            return response
        await response.write(openai.DONE)
        await response.write_eof()
        return response

    async def _events(self, reply: openai.Reply, performance: Performance) -> AsyncIterator[list[bytes]]:
        """Yield the events of a stream, batch by batch, without its end mark."""
        ask = performance.ask
        greeted = not ask.is_chat
        async for choices in performance.deltas():
            self._count(choices)
            bodies = [] if greeted else _greetings(reply, performance)
            greeted = True
            for choice in choices:
                is_signed = choice.finish_reason is not None and not ask.include_usage
                running = performance.running_count(choice.index)
                bodies.append(openai.delta_chunk(reply, choice, running, is_signed=is_signed))
            yield [openai.event(body) for body in bodies]
        if ask.include_usage:
            yield [openai.event(openai.usage_chunk(reply, performance.count()))]

    def _count(self, choices: list[openai.Choice]) -> None:
        for choice in choices:
            if choice.finish_reason is not None:
                self.metrics.ended(choice.finish_reason)


def _greetings(reply: openai.Reply, performance: Performance) -> list[dict[str, object]]:
    """Write the chunk with the role for each choice of a chat, all before the first text."""
    bodies = []
    for index in range(len(performance.job.sequences)):
        running = performance.running_count(index)
        start = None if running is None else msgspec.structs.replace(running, completion_tokens=0)
        bodies.append(openai.role_chunk(reply, index, performance.prompt_ids(index), start))
    return bodies


def _with_session(body: dict[str, Any], request: web.Request) -> dict[str, Any]:
    """Take the session from its header where the body names none."""
    session = body.get("session_id") or request.headers.get("X-Session-ID")
    return body | {"session_id": session} if session else body


def _cut(request: web.Request) -> None:
    if request.transport is not None:
        request.transport.abort()


def json_response(body: object, status: int = 200) -> web.Response:
    """Write a JSON body as compactly as vLLM does; half characters that a client sent are escaped."""
    try:
        data = orjson.dumps(body)
    except orjson.JSONEncodeError:
        data = json.dumps(body, separators=(",", ":")).encode()
    return web.Response(body=data, status=status, content_type="application/json")
