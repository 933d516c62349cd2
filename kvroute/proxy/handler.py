"""The public door: which routes there are, who may ask, how errors look, and one line per request at its end.

What lies behind the door is in question.py (what is asked) and dispatch.py (who answers).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from msgspec import Struct

from kvroute.errors import BadRequest, KvrouteError, NoReplica
from kvroute.proxy import headers, openai
from kvroute.proxy.catalogue import Catalogue, ServedModel
from kvroute.proxy.dispatch import Dispatch
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.placing import Placing
from kvroute.proxy.question import Asker
from kvroute.proxy.request import Request
from kvroute.proxy.request_log import RequestLog
from kvroute.proxy.sse import error_event
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
    """Serves the public listener; `handle` is the function to give to a `Listener`."""

    def __init__(
        self,
        *,
        asker: Asker,
        dispatch: Dispatch,
        placing: Placing,
        catalogue: Catalogue,
        cards: Callable[[], Iterable[ModelCard]],
        tenants: Tenants,
        stats: HandlerStats,
        settings: HandlerSettings,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._asker = asker
        self._dispatch = dispatch
        self._placing = placing
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

    async def handle(self, exchange: Exchange) -> None:
        """Answer one request, whatever happens; only a client that left gets nothing."""
        visit = Visit(headers.request_id(exchange.request.fields.get(headers.REQUEST_ID)), self._clock())
        self._stats.active += 1
        try:
            try:
                await self._serve(exchange, visit)
            except KvrouteError as error:
                visit.ended("failed" if error.retryable else "refused", error.message)
                _refuse(exchange, error, visit)
            except ConnectionError:
                raise
            except Exception as error:  # the border: our own mistakes become a 500 and a trace in the log
                self._mistake(exchange, visit, error)
            visit.status = exchange.status
        except BaseException:  # cancelled, or a connection error: the client left
            visit.ended("abandoned", "the client left")
            visit.status = CLIENT_CLOSED
            raise
        finally:
            self._stats.active -= 1
            visit.close(self._stats, self._log, self._clock())

    def _mistake(self, exchange: Exchange, visit: Visit, error: Exception) -> None:
        self._stats.unexpected_errors += 1
        log.exception("request %s", visit.id)
        visit.ended("failed", repr(error))
        if exchange.status and not exchange.is_ahead:
            raise ConnectionResetError("an answer had begun") from error
        _refuse(exchange, KvrouteError("The router made a mistake; its log says more"), visit)

    async def _serve(self, exchange: Exchange, visit: Visit) -> None:
        request = exchange.request
        visit.tenant = self._tenants.tenant(request.headers)
        _check_route(request.path, request.method)
        if request.path == MODELS_PATH:
            visit.ended("done")
            exchange.respond(200, headers.ours(visit.id), openai.models_body(self._cards(), self._created_s))
            return
        body = await exchange.body(self._settings.body_bytes_max)
        inference = _read(request, body)
        served = self._catalogue.find(inference.model) or await self._served(inference.model)
        visit.model = served.lora or served.entry.base
        priority = self._tenants.priority(visit.tenant, request.headers)
        question = await self._asker.ask(inference, served, visit.tenant, priority)
        await self._dispatch.answer(exchange, body, question, inference, visit)

    async def _served(self, model: str | None) -> ServedModel:
        """Find a model that is not known, waiting for the first replica where none was seen yet."""
        await self._placing.wait_until(lambda: bool(self._catalogue.names()))
        served = self._catalogue.find(model)
        if served is not None:
            return served
        names = self._catalogue.names()
        if not names:
            raise NoReplica("No replica has been seen yet; try again")
        if model is None:
            raise openai.which_model(names)
        raise openai.unknown_model(model, names)


def _read(request: Request, body: bytes) -> openai.Inference:
    if request.fields.get(b"content-encoding", b"identity") != b"identity":  # not ours to unpack, nor vLLM's
        return openai.Inference(kind="other", guessed_tokens=len(body))
    return openai.parse(request.path, body, request.fields.get(b"content-type", b"").decode("latin-1"))


def _check_route(path: str, method: str) -> None:
    if path == MODELS_PATH:
        allowed = "GET"
    elif path in openai.ROUTES:
        allowed = "POST"
    else:
        raise BadRequest(f"There is no route {path} here", status=404, kind="NotFoundError")
    if method != allowed:
        raise BadRequest(f"{path} takes {allowed}, not {method}", status=405, kind="MethodNotAllowedError")


def _refuse(exchange: Exchange, error: KvrouteError, visit: Visit) -> None:
    if exchange.is_ahead:  # the status is out
        exchange.end(error_event(openai.error_body(error)))
        return
    head = headers.ours(visit.id)
    if error.retry_after_s is not None:
        head.append((b"Retry-After", b"%d" % max(1, round(error.retry_after_s))))
    if error.status == 405:
        head.append((b"Allow", b"GET" if error.message.startswith(MODELS_PATH) else b"POST"))
    if error.status == 401:
        head.append((b"WWW-Authenticate", b"Bearer"))
    exchange.respond(error.status, head, openai.error_body(error))
