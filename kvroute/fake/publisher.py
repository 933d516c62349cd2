"""Publishing event batches over ZeroMQ as vLLM does: numbered, with a buffer for replay.

Rules of vLLM's ZmqEventPublisher (vllm/distributed/kv_events.py), release 0.32: an endpoint with a wildcard is bound,
any other one is dialled, so that a subscriber has to bind it; the replay endpoint is always bound. Port 0 takes a free
port.
A batch is sent as (topic, number, payload), numbers from 0; then it is kept, the last BUFFER_STEPS of them. A replay
request is (empty, number); its answer one message for each kept batch from that number on, (empty, topic, number,
payload), and an end mark (empty, empty, all ones, empty).
"""

from __future__ import annotations

import asyncio
from collections import deque
from itertools import count

import msgspec
import zmq
from msgspec import Struct

from kvroute.errors import ConfigError

SEQ_BYTES = 8
END_SEQ = b"\xff" * SEQ_BYTES
BUFFER_STEPS = 10_000
HIGH_WATER = 100_000  # messages that a slow subscriber may be behind
QUESTIONS_AT_ONCE = 16


class PublisherConfig(Struct, frozen=True, kw_only=True):
    """The settings under vLLM's names, as `/kv_event_sources` shows them."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = BUFFER_STEPS
    hwm: int = HIGH_WATER
    max_queue_size: int = HIGH_WATER
    topic: str = ""


class EventPublisher:
    """One engine rank's publisher, on the running event loop."""

    def __init__(self, config: PublisherConfig) -> None:
        self.config = config
        self.dropping = 0  # batches that will be numbered and kept, but not sent
        self._topic = config.topic.encode()
        self._numbers = count()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_steps)
        self._pub: zmq.Socket[bytes] | None = None
        self._replay: zmq.Socket[bytes] | None = None

    def start(self) -> None:
        """Open the sockets, and put the ports that were taken into `config`.

        Raises:
            ConfigError: an endpoint cannot be used.
        """
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
        try:
            self._pub = context.socket(zmq.PUB)
            self._pub.set_hwm(self.config.hwm)
            endpoint = _opened(self._pub, self.config.endpoint, bind=_is_bound(self.config.endpoint))
            replay_endpoint = None
            if self.config.replay_endpoint:
                self._replay = context.socket(zmq.ROUTER)
                replay_endpoint = _opened(self._replay, self.config.replay_endpoint, bind=True)
                asyncio.get_running_loop().add_reader(self._replay.FD, self._on_question)
        except BaseException:
            self.close()
            raise
        self.config = msgspec.structs.replace(self.config, endpoint=endpoint, replay_endpoint=replay_endpoint)

    def close(self) -> None:
        """Close the sockets; what is still queued gets a moment to leave."""
        if self._replay is not None:
            asyncio.get_running_loop().remove_reader(self._replay.FD)
            self._replay.close(0)
        if self._pub is not None:
            self._pub.close(200)
        self._pub = self._replay = None

    def publish(self, payload: bytes) -> None:
        """Number a batch, send it and keep it. Subscribers that are too far behind miss it."""
        if self._pub is None:
            return
        number = next(self._numbers).to_bytes(SEQ_BYTES, "big")
        if self.dropping:
            self.dropping -= 1
        else:
            self._pub.send_multipart((self._topic, number, payload), zmq.NOBLOCK)
        self._kept.append((number, payload))
        self._on_question()  # sending may have swallowed the descriptor's signal

    def _on_question(self) -> None:
        """Answer the replay requests that have come."""
        replay = self._replay
        for _ in range(QUESTIONS_AT_ONCE):
            if replay is None:
                return
            try:
                frames = replay.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            if len(frames) == 3:
                self._answer(replay, frames[0], frames[2])
        asyncio.get_running_loop().call_soon(self._on_question)

    def _answer(self, replay: zmq.Socket[bytes], asker: bytes, start: bytes) -> None:
        first = int.from_bytes(start, "big")
        for number, payload in self._kept:
            if int.from_bytes(number, "big") >= first:
                replay.send_multipart(self._replay_frames(asker, number, payload), zmq.NOBLOCK)
        replay.send_multipart(self._replay_frames(asker, END_SEQ, b""), zmq.NOBLOCK)

    def _replay_frames(self, asker: bytes, number: bytes, payload: bytes) -> list[bytes]:
        return [asker, b"", b"" if number == END_SEQ else self._topic, number, payload]


def _is_bound(endpoint: str) -> bool:
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def _opened(socket: zmq.Socket[bytes], endpoint: str, *, bind: bool) -> str:
    """Bind or dial, and return the endpoint with its real port."""
    socket.setsockopt(zmq.IPV6, "[" in endpoint)
    try:
        (socket.bind if bind else socket.connect)(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(
            f"kv_events: cannot use {endpoint!r}: {error}; give tcp://*:PORT or tcp://HOST:PORT"
        ) from None
    if not bind or not endpoint.endswith(":0"):
        return endpoint
    port = socket.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
    return f"{endpoint.rpartition(':')[0]}:{port}"
