"""One attempt's answer, carried from the replica to the client as it comes.

The client is committed to only after the engine's first words were looked at, so that an attempt which failed without
serving anything can be made elsewhere. After that nothing can be taken back: a failure is passed on in a form that the
client can see. Reading waits for writing, so a slow client slows its own stream and nothing else.

On the client's side every connection error means that the client left; on the replica's side errors arrive as
`ReplicaFailed` (see adapters/upstream.py). The two never mix here.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from kvroute.adapters.connection import Answer
from kvroute.errors import ReplicaBroke, ReplicaFailed
from kvroute.proxy import answer as answers
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.headers import RawHeader, find
from kvroute.proxy.openai import error_body
from kvroute.proxy.sse import EventStream, Opening, error_event, opening
from kvroute.routing.demand import Usage

WHOLE_BYTES_MAX = 1 << 20  # of an answer in one piece that is looked at before the client gets any of it
OPENING_BYTES_MAX = 1 << 20  # of first events that say nothing
REASON_BYTES_MAX = 64 << 10  # of an error's body
BUSY = (429, 503)  # the replica is full, which is no fault of its own
REPLICAS_FAULT = (401, 403, 408, 429, 500, 502, 503, 504)  # 401, 403: our key is wrong there; clients' never get there


class Order(Struct, frozen=True, kw_only=True):
    """How an answer is to be carried."""

    replica: str
    headers: list[RawHeader]  # of the answer, the router's own included
    strips_usage: bool  # usage was asked for on the client's behalf
    wants_text: bool  # the index can learn from the answer
    stall_s: float  # a client that takes nothing for this long has left
    began: Callable[[], None]  # called at the first byte of its body


class Delivery(Struct):
    """What came of an attempt that reached the client."""

    usage: Usage | None = None
    events: bytes = b""  # of a stream, to read its text from
    text: str | None = None  # of an answer in one piece
    failure: ReplicaFailed | None = None  # the replica broke after the client had seen some of its answer


async def refusal(answer: Answer, replica: str) -> ReplicaFailed:
    """Return what an answer with one of REPLICAS_FAULT says about the replica.

    Raises:
        ReplicaFailed: the replica broke while it was saying so.
    """
    body = b""
    while len(body) < REASON_BYTES_MAX and (part := await answer.read()):
        body += part
    reason = answers.reason(body)
    error = ReplicaBroke(
        f"{replica} answered {answer.status}{': ' if reason else ''}{reason}", replica=replica, answered=True
    )
    if answer.status in BUSY:
        error.status, error.kind, error.retry_after_s = 503, "ServiceUnavailableError", 1.0
    return error


async def relay(exchange: Exchange, answer: Answer, order: Order) -> Delivery:
    """Carry an answer to the client.

    Raises:
        ReplicaFailed: before the client got anything, so another replica may be tried.
        ConnectionError: the client left.
    """
    content_type = find(answer.headers, b"content-type") or b""
    if content_type.startswith(b"text/event-stream") and find(answer.headers, b"content-encoding") is None:
        return await _stream(exchange, answer, order)
    return await _whole(exchange, answer, order)


async def _whole(exchange: Exchange, answer: Answer, order: Order) -> Delivery:
    body = b""
    while part := answer.take() if answer.complete else await answer.read():  # complete: there is nothing to wait for
        if not body:
            order.began()
        body += part
        if len(body) > WHOLE_BYTES_MAX:
            return await _large(exchange, answer, order, body)
    if answer.status == 200 and answers.was_aborted(body):
        raise ReplicaBroke(f"{order.replica} aborted the request", replica=order.replica)
    if exchange.is_ahead:  # it was promised events: the engine's error, or an answer in one piece, is one
        exchange.end(error_event(body.replace(b"\n", b" ")))
    else:
        exchange.respond(answer.status, order.headers, body)
    if exchange.is_full:
        await exchange.drained(order.stall_s)
    if answer.status != 200:
        return Delivery()
    usage, text = answers.read_body(body) if b'"usage"' in body else (None, None)
    return Delivery(usage=usage, text=text if order.wants_text else None)


async def _large(exchange: Exchange, answer: Answer, order: Order, first: bytes) -> Delivery:
    """Carry a large answer without looking at it. If it breaks off, so does the client's connection."""
    if exchange.is_ahead:
        raise ReplicaBroke(f"{order.replica} sent something else than events", replica=order.replica)
    length = find(answer.headers, b"content-length")
    exchange.start(answer.status, order.headers, None if length is None else int(length))
    part = first
    try:
        while part:
            exchange.write(part)
            await _room(exchange, order)
            part = await answer.read()
    except ReplicaFailed as error:
        error.bytes_sent = True
        exchange.cut()
        return Delivery(failure=error)
    exchange.end()
    return Delivery()


async def _stream(exchange: Exchange, answer: Answer, order: Order) -> Delivery:
    stream = EventStream(strips_usage=order.strips_usage, keeps_text=order.wants_text)
    passed = await _opened(answer, stream, order)
    if exchange.is_ahead:
        exchange.is_ahead = False
    else:
        exchange.start(answer.status, order.headers)
    failure: ReplicaFailed | None = None
    try:
        is_last = answer.complete  # true only right after reading: later it does not say that everything was read
        while not is_last:
            exchange.write(passed)
            if exchange.is_full:
                await exchange.drained(order.stall_s)
            passed = stream.feed(await answer.read())
            is_last = answer.complete
        passed += stream.finish()
    except ReplicaFailed as error:
        failure = error
        passed = stream.held() + error_event(error_body(error))
        exchange.keep_alive = False
    exchange.end(passed)
    await _room(exchange, order)
    if failure is None and stream.failure is not None:
        failure = ReplicaBroke(f"{order.replica}: {stream.failure}", replica=order.replica)
    if failure is not None:
        failure.bytes_sent = True
    usage = answers.usage_in_event(stream.usage_event)
    return Delivery(usage=usage, events=b"".join(stream.kept or ()), failure=failure)


async def _opened(answer: Answer, stream: EventStream, order: Order) -> bytes:
    """Return the first events once they show that the engine serves the request."""
    first = b""
    spoke = False
    while data := await answer.read():
        if not spoke:
            spoke = True
            order.began()
        first += stream.feed(data)
        verdict = opening(first) if first else Opening.WAIT
        if verdict is Opening.REFUSED:
            raise ReplicaBroke(f"{order.replica}: {stream.failure}", replica=order.replica)
        if verdict is Opening.SERVED or len(first) > OPENING_BYTES_MAX:
            return first
    raise ReplicaBroke(f"{order.replica} ended its answer without saying anything", replica=order.replica)


async def _room(exchange: Exchange, order: Order) -> None:
    if exchange.is_full:
        await exchange.drained(order.stall_s)
