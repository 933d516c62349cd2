"""One engine rank's event stream, read to the end and in order, whatever happens on the way.

A SUB socket takes live batches. What has arrived is read on the event loop, in short turns that all streams of a
process share (`turns.py`); ZeroMQ's own thread reads ahead meanwhile, up to RECEIVED_LIMIT messages, beyond which the
publisher drops and a hole shows. What is new and what is missing is decided in `kv.event_sequence`; holes and new
connections are settled over the replay socket. Connections are noticed through the socket's monitor, which speaks
before the first batch is readable.

An engine that has become silent is asked now and then, and once soon after each connection: a batch lost between the
connection and the subscription, or dropped last, shows in no later one.

What is in a batch is not known here. Frames: (topic, number, payload); source: vLLM's ZmqEventPublisher,
vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import zmq
from msgspec import Struct

from kvroute.adapters import event_replay
from kvroute.adapters.event_replay import MAX_MESSAGE_BYTES, SEQ_BYTES, needs_ipv6
from kvroute.adapters.turns import Turns
from kvroute.kv.event_sequence import EventSequence, EventSink, Position, SequenceCounters

log = logging.getLogger(__name__)

SOCKETS_LIMIT = 16_384  # of one process: a stream takes three, and another one during a replay; ZeroMQ's own is 1,023
RECEIVED_LIMIT = 10_000  # messages that wait in the socket
TICK_S = 1.0  # how often the stream looks after itself; also how soon after a connection it asks again
CHECK_S = 30.0  # an engine silent for so long is asked whether that is all
HEARTBEAT_MS, LOST_MS = 5_000, 15_000  # a peer that answers no ping for so long is dialled again
RETRY_MS, RETRY_LIMIT_MS = 100, 2_000  # between attempts to connect


class StreamCounters(Struct):
    """Totals of one stream's socket since it started."""

    received: int = 0  # messages
    malformed: int = 0  # messages without the right frames
    connections: int = 0
    failures: int = 0  # errors of the sink or of a replay; each is logged
    last_heard_s: float | None = None  # monotonic time of the last message


class EventStream:
    """The stream of one engine rank. `start` it on a running event loop, and `close` it.

    `endpoint` is dialled, or bound where the engine connects (`bind`). Without `replay_endpoint` holes become gaps.
    An empty `topic` takes every batch, another one exactly its own. `position` is where to resume. Streams of one
    process should share `turns`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        sink: EventSink,
        replay_endpoint: str | None = None,
        topic: str = "",
        position: Position | None = None,
        bind: bool = False,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
        check_s: float = CHECK_S,
        replay_silence_s: float = event_replay.SILENCE_S,
        turns: Turns | None = None,
    ) -> None:
        self.endpoint = endpoint
        self.replay_endpoint = replay_endpoint
        self.counters = StreamCounters()
        self._sequence = EventSequence(sink, can_replay=replay_endpoint is not None, position=position)
        self._topic = topic.encode()
        self._bind = bind
        self._context = context or _shared_context()
        self._check_s = check_s
        self._replay_silence_s = replay_silence_s
        self._turns = turns or Turns()
        self._socket: zmq.Socket[bytes] | None = None
        self._monitor: zmq.Socket[bytes] | None = None
        self._tending: asyncio.Task[None] | None = None
        self._call = asyncio.Event()  # there is something to ask for
        self._checked_s = 0.0  # when the engine was last heard or asked
        self._connected_s: float | None = None  # when a connection was made about which to ask once more
        self._is_new_line = False  # a connection was made, and the sequence has not been told

    @property
    def position(self) -> Position | None:
        """The last batch that the sink took, and its digest; None where it took none of this life."""
        return self._sequence.position

    @property
    def sequence_counters(self) -> SequenceCounters:
        """What became of the batches."""
        return self._sequence.counters

    @property
    def is_settled(self) -> bool:
        """Whether nothing is open: no replay is wanted or under way."""
        return not self._sequence.is_asking and not self._sequence.is_behind

    def rewind(self, position: Position | None) -> None:
        """Hand on again what came after `position`, as far as the engine keeps it. Not to be called by the sink."""
        self._sequence.rewind(position)
        self._call.set()

    async def start(self) -> None:
        """Open the sockets; connecting goes on in the background, again and again.

        Raises:
            zmq.ZMQError: the endpoint cannot be one, or cannot be bound.
        """
        socket = self._context.socket(zmq.SUB)
        try:
            self._set_up(socket)
        except BaseException:
            self._close(socket)
            raise
        self._socket = socket
        self._checked_s = time.monotonic()
        loop = asyncio.get_running_loop()
        loop.add_reader(socket.FD, self._on_readable)
        assert self._monitor is not None
        loop.add_reader(self._monitor.FD, self._on_readable)
        self._tending = asyncio.create_task(self._tend(), name=f"events {self.endpoint}")
        self._on_readable()  # a descriptor tells once, and may have told before anybody listened

    async def close(self) -> None:
        """Close the sockets. The sink hears no more."""
        if self._tending is not None:
            self._tending.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._tending
            self._tending = None
        socket, self._socket = self._socket, None
        if socket is not None:
            loop = asyncio.get_running_loop()
            loop.remove_reader(socket.FD)
            assert self._monitor is not None
            loop.remove_reader(self._monitor.FD)
            self._close(socket)

    def _close(self, socket: zmq.Socket[bytes]) -> None:
        monitor, self._monitor = self._monitor, None
        socket.disable_monitor()
        if monitor is not None:
            monitor.close(0)
        socket.close(0)

    def _set_up(self, socket: zmq.Socket[bytes]) -> None:
        for option, value in (
            (zmq.LINGER, 0),
            (zmq.RCVHWM, RECEIVED_LIMIT),
            (zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES),
            (zmq.HEARTBEAT_IVL, HEARTBEAT_MS),
            (zmq.HEARTBEAT_TIMEOUT, LOST_MS),
            (zmq.RECONNECT_IVL, RETRY_MS),
            (zmq.RECONNECT_IVL_MAX, RETRY_LIMIT_MS),
            (zmq.IPV6, needs_ipv6(self.endpoint)),
        ):
            socket.setsockopt(option, value)
        socket.setsockopt(zmq.SUBSCRIBE, self._topic)
        self._monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        if self._bind:
            socket.bind(self.endpoint)
        else:
            socket.connect(self.endpoint)

    def _on_readable(self) -> None:
        self._turns.want(self._read)

    def _read(self, until_s: float) -> bool:
        """Take what has arrived, until a monotonic time; return whether there is more."""
        try:
            return self._read_some(until_s)
        except Exception as error:
            self.counters.failures += 1
            log.exception("events of %s: a batch was not taken in, and counts as lost", self.endpoint)
            self._sequence.check()
            return not isinstance(error, zmq.ZMQError)  # the socket itself: it will be tried again, but not at once
        finally:
            if self._sequence.wanted is not None:
                self._call.set()

    def _read_some(self, until_s: float) -> bool:
        while self._sequence.is_behind:
            self._sequence.step()
            if time.monotonic() >= until_s:
                return True
        while (socket := self._socket) is not None and _has_more(socket):
            message = self._receive(socket)
            self._look_at_line()
            if message is not None:
                self._sequence.live(*message)
            self.counters.last_heard_s = self._checked_s = now_s = time.monotonic()
            if now_s >= until_s:
                return True
        self._look_at_line()
        if self._is_new_line:  # without replay: the next batch shows that those after it cannot be vouched for
            self._is_new_line = False
            self._sequence.connected()
        return False

    def _receive(self, socket: zmq.Socket[bytes]) -> tuple[int, bytes] | None:
        frames = socket.recv_multipart(zmq.NOBLOCK)
        self.counters.received += 1
        if len(frames) != 3 or len(frames[1]) != SEQ_BYTES:
            self.counters.malformed += 1
        elif not self._topic or frames[0] == self._topic:  # a subscription is for all topics that begin so
            return int.from_bytes(frames[1], "big"), frames[2]
        return None

    def _look_at_line(self) -> None:
        """Notice a new connection. With replay it settles whatever comes from now on; without, what has arrived, before
        the connection or with it, is read first."""
        self._is_new_line |= self._was_connected()
        if self._is_new_line and self.replay_endpoint is not None:
            self._is_new_line = False
            self._sequence.connected()

    def _was_connected(self) -> bool:
        """Read the monitor: whether a connection was made since the last time."""
        was_connected = False
        while self._monitor is not None and _has_more(self._monitor):
            self._monitor.recv_multipart(zmq.NOBLOCK)  # it tells of nothing else
            self.counters.connections += 1
            self._connected_s = time.monotonic()
            was_connected = True
        return was_connected

    async def _tend(self) -> None:
        """Ask for replays, and look after the stream once in a while."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await self._call.wait()
            self._call.clear()
            try:
                self._tick()
                while self._sequence.wanted is not None:
                    await self._replay()
            except Exception:
                self.counters.failures += 1
                log.exception("events of %s: a replay from %s was not taken", self.endpoint, self.replay_endpoint)

    def _tick(self) -> None:
        now_s = time.monotonic()
        is_fresh = self._connected_s is not None and now_s - self._connected_s > TICK_S
        if is_fresh or (self.counters.connections and now_s - self._checked_s > self._check_s):
            self._connected_s = None if is_fresh else self._connected_s
            self._sequence.check()
        self._on_readable()  # should a descriptor ever not have told

    async def _replay(self) -> None:
        assert self.replay_endpoint is not None
        start = self._sequence.ask()
        is_complete = False
        try:
            is_complete = await event_replay.ask(
                self._context,
                self.replay_endpoint,
                start,
                self._sequence.replayed,
                is_useless=lambda: self._sequence.is_answer_useless,
                silence_s=self._replay_silence_s,
                turn=self._turns.alone,
            )
        finally:
            self._checked_s = time.monotonic()
            self._sequence.answered(is_complete=is_complete)
            self._on_readable()  # there may be batches that were held back


def _shared_context() -> zmq.Context[zmq.Socket[bytes]]:
    """Return the context of all streams of this process: one thread that reads and writes for them."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context.instance()
    context.set(zmq.MAX_SOCKETS, SOCKETS_LIMIT)  # has an effect before the first socket only
    return context


def _has_more(socket: zmq.Socket[bytes]) -> bool:
    """Return whether a message is readable: asking is cheaper than trying in vain."""
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)
