"""One question to an engine's replay socket: all batches that it still keeps, from a number on.

The request is an empty frame and the number, 8 bytes big-endian. Each kept batch is one message of its own, then comes
an end mark whose number is all ones. vLLM to 0.25 sends (empty, number, payload), since 0.26 (empty, topic, number,
payload): frames are read from the end. Source: vLLM's ZmqEventPublisher, vllm/distributed/kv_events.py, PR #45177.

A server drops messages of a long answer that we do not take fast enough, the end mark included: whoever asks must be
ready for holes and for an answer without an end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import zmq
import zmq.asyncio

from kvroute.adapters.turns import TURN_S

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
MAX_MESSAGE_BYTES = 64 * 1024 * 1024  # a larger one ends the connection
SILENCE_S = 2.0  # before an answer: an engine looks for questions ten times a second
PAUSE_S = 0.5  # within an answer, which an engine sends in one go: the rest was dropped
ANSWER_S = 60.0  # the longest answer
WAKE_S = 0.1  # how soon an answer that nobody needs is abandoned
RECEIVED_LIMIT = 20_000  # messages that wait here: twice what an engine keeps by default


def needs_ipv6(endpoint: str) -> bool:
    """Return whether an endpoint is an IPv6 address.

    ZeroMQ tries one address of a name only. With IPv6 allowed that may be one that engines, which bind wildcards on
    IPv4, do not listen on.
    """
    return "[" in endpoint


async def ask(
    context: zmq.Context[zmq.Socket[bytes]],
    endpoint: str,
    start: int,
    take: Callable[[int, bytes], bool],
    *,
    is_useless: Callable[[], bool] = lambda: False,
    silence_s: float = SILENCE_S,
    turn: asyncio.Lock | None = None,
) -> bool:
    """Give `take` every batch of the answer, in order, until it says False. True: the answer came to its end mark.

    Replays that share `turn` read one after another, each for TURN_S at a time.

    Raises:
        zmq.ZMQError: the endpoint cannot be one.
    """
    raw = context.socket(zmq.DEALER)
    try:
        raw.setsockopt(zmq.LINGER, 0)
        raw.setsockopt(zmq.RCVHWM, RECEIVED_LIMIT)
        raw.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        raw.setsockopt(zmq.IPV6, needs_ipv6(endpoint))
        raw.connect(endpoint)
        raw.send_multipart([b"", start.to_bytes(SEQ_BYTES, "big")], zmq.NOBLOCK)
        socket = zmq.asyncio.Socket.from_socket(raw)
        try:
            return await _read(socket, raw, take, is_useless, silence_s, turn or asyncio.Lock())
        finally:
            socket.close(0)
    finally:
        raw.close(0)


async def _read(
    socket: zmq.asyncio.Socket,
    raw: zmq.Socket[bytes],
    take: Callable[[int, bytes], bool],
    is_useless: Callable[[], bool],
    silence_s: float,
    turn: asyncio.Lock,
) -> bool:
    began_s = heard_s = time.monotonic()
    while not is_useless():
        now_s = time.monotonic()
        patience_s = silence_s if heard_s == began_s else min(PAUSE_S, silence_s)
        if now_s - heard_s > patience_s or now_s - began_s > ANSWER_S:
            return False
        if not await socket.poll(int(WAKE_S * 1000)):
            continue
        async with turn:
            is_over = _read_some(raw, take)
            await asyncio.sleep(0)
        if is_over is not None:
            return is_over
        heard_s = time.monotonic()
    return False


def _read_some(raw: zmq.Socket[bytes], take: Callable[[int, bytes], bool]) -> bool | None:
    """Take what has come, for TURN_S; return whether the answer came to its end mark, None where it is not over."""
    until_s = time.monotonic() + TURN_S
    while time.monotonic() < until_s:
        try:
            frames = raw.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return None
        if len(frames) < 3 or len(frames[-2]) != SEQ_BYTES:
            continue  # no batch, and no end
        if frames[-2] == END_SEQ:
            return True
        if not take(int.from_bytes(frames[-2], "big"), frames[-1]):
            return False
    return None
