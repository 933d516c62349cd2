"""The public door: which routes there are, who may ask, how errors look, and one line per request at its end.

What lies behind the door is in question.py (what is asked) and dispatch.py (who answers).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from aiohttp import web
from msgspec import Struct

from kvroute.errors import BadRequest, KvrouteError, NoReplica
from kvroute.proxy import headers, openai
from kvroute.proxy.catalogue import Catalogue, ServedModel
from kvroute.proxy.dispatch import Dispatch
from kvroute.proxy.question import Asker
from kvroute.proxy.request_log import RequestLog
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.tenants import Tenants
from kvroute.proxy.visit import Visit
from kvroute.routing.replica import ModelCard

log = logging.getLogger("kvroute.handler")

MODELS_PATH = "/v1/models"
CLIENT_CLOSED = 499  # nginx's number for a client that left; it is logged and counted, nobody receives it


class HandlerSettings(Struct, frozen=True, kw_only=True):
    """Limits and habits of the public door."""

    body_bytes_max: int = 64 << 20
    log_requests: bool = True


class Handler:
    """Serves the public listener; `handle` is the function to give to `web.Server`."""

    def __init__(
        self,
        *,
        asker: Asker,
        dispatch: Dispatch,
        catalogue: Catalogue,
        cards: Callable[[], Iterable[ModelCard]],
        tenants: Tenants,
        stats: HandlerStats,
        settings: HandlerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = asker
        self._dispatch = dispatch
        self._catalogue = catalogue
        self._cards = cards
        self._tenants = tenants
        self._stats = stats
        self._settings = settings
        self._clock = clock
        self._log = RequestLog(is_on=settings.log_requests)
        self._created_s = int(time.time())

    def close(self) -> None:
        """Write the lines of the last requests."""
        self._log.flush()

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Answer one request, whatever happens; only a client that left gets nothing."""
        visit = Visit(headers.request_id(request.headers.get(headers.REQUEST_ID)), self._clock())
        self._stats.active += 1
        try:
            response = await self._answered(request, visit)
            visit.status = response.status
            return response
        except BaseException:  # cancelled, or a connection error: the client left
            visit.ended("abandoned", "the client left")
            visit.status = CLIENT_CLOSED
            raise
        finally:
            self._stats.active -= 1
            visit.close(self._stats, self._log, self._clock())

    async def _answered(self, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        try:
            return await self._serve(request, visit)
        except KvrouteError as error:
            visit.ended("failed" if error.retryable else "refused", error.message)
            return _refused(error, visit)
        except ConnectionError:
            raise
        except Exception as error:  # the border: our own mistakes become a 500 and a trace in the log
            self._stats.unexpected_errors += 1
            log.exception("request %s", visit.id)
            visit.ended("failed", repr(error))
            if request.writer.output_size:
                raise ConnectionResetError("an answer had begun") from error
            return _refused(KvrouteError("The router made a mistake; its log says more"), visit)

    async def _serve(self, request: web.BaseRequest, visit: Visit) -> web.StreamResponse:
        visit.tenant = self._tenants.tenant(request.raw_headers)
        path = request.path
        _check_route(path, request.method)
        if path == MODELS_PATH:
            visit.ended("done")
            body = openai.models_body(self._cards(), self._created_s)
            return web.Response(body=body, content_type="application/json", headers={headers.REQUEST_ID: visit.id})
        body = await self._body(request)
        inference = _read(request, body)
        served = await self._served(inference.model)
        visit.model = served.lora or served.entry.base
        question = await self._asker.ask(inference, served, visit.tenant)
        query = request.rel_url.raw_query_string
        target = f"{path}?{query}" if query else path
        return await self._dispatch.answer(request, target, body, question, inference, visit)

    async def _body(self, request: web.BaseRequest) -> bytes:
        limit = self._settings.body_bytes_max
        if (request.content_length or 0) > limit:
            raise _too_large(limit)
        if request.headers.get("Expect", "").lower() == "100-continue":
            await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            request.writer.output_size = 0
        parts: list[bytes] = []
        size = 0
        try:
            while part := await request.content.readany():
                parts.append(part)
                size += len(part)
                if size > limit:
                    raise _too_large(limit)
        except web.RequestPayloadError as error:
            raise BadRequest(f"The body cannot be read: {error}", param="body") from None
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _served(self, model: str | None) -> ServedModel:
        """Find the model, waiting for the first replica where none was seen yet."""
        served = self._catalogue.find(model)
        if served is None:
            await self._dispatch.wait_until(lambda: bool(self._catalogue.names()))
            served = self._catalogue.find(model)
        if served is not None:
            return served
        names = self._catalogue.names()
        if not names:
            raise NoReplica("No replica has been seen yet; try again")
        if model is None:
            choices = ", ".join(names)
            raise BadRequest(f"This pool serves several models; set `model` to one of: {choices}", param="model")
        raise openai.unknown_model(model, names)


def _read(request: web.BaseRequest, body: bytes) -> openai.Inference:
    if request.headers.get("Content-Encoding", "identity") != "identity":  # not ours to unpack, nor vLLM's
        return openai.Inference(kind="other", guessed_tokens=len(body))
    return openai.parse(request.path, body, request.headers.get("Content-Type", ""))


def _check_route(path: str, method: str) -> None:
    if path == MODELS_PATH:
        allowed = "GET"
    elif path in openai.ROUTES:
        allowed = "POST"
    else:
        raise BadRequest(f"There is no route {path} here", status=404, kind="NotFoundError")
    if method != allowed:
        raise BadRequest(f"{path} takes {allowed}, not {method}", status=405, kind="MethodNotAllowedError")


def _too_large(limit_bytes: int) -> BadRequest:
    message = f"The body is larger than {limit_bytes} bytes, which is this router's limit (proxy.body_bytes_max)"
    return BadRequest(message, status=413, kind="RequestEntityTooLargeError")


def _refused(error: KvrouteError, visit: Visit) -> web.Response:
    head = {headers.REQUEST_ID: visit.id}
    if error.retry_after_s is not None:
        head["Retry-After"] = str(max(1, round(error.retry_after_s)))
    if error.status == 405:
        head["Allow"] = "GET" if error.message.startswith(MODELS_PATH) else "POST"
    if error.status == 401:
        head["WWW-Authenticate"] = "Bearer"
    body = openai.error_body(error)
    return web.Response(status=error.status, body=body, content_type="application/json", headers=head)
