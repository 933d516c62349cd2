"""Publishers of event batches in this process, which lose, fall silent and come back on their ports; and what hears."""

from __future__ import annotations

import asyncio

import zmq

from kvroute.adapters.vllm_events import EventStream
from kvroute.errors import ConfigError
from kvroute.fake.publisher import EventPublisher, PublisherConfig
from tests.kv import sinks as kv


class Log(kv.Log):
    """A sink that writes down what it is told, and can be waited for."""

    async def until(self, last, timeout_s=15.0):
        """Wait until the last thing told is `last`."""
        async with asyncio.timeout(timeout_s):
            while not self.told or self.told[-1] != last:
                await asyncio.sleep(0.005)


class OldPublisher(EventPublisher):
    """vLLM to 0.25: replayed batches carry no topic."""

    def _replay_frames(self, asker, number, payload):
        return [asker, b"", number, payload]


class Publisher:
    """An engine's publisher in its first life; `restart` begins another one on the same ports."""

    def __init__(self, *, kind=EventPublisher, **config):
        self.kind = kind
        self.life = "a"
        self.count = 0
        config = {"endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0", "topic": "kv@r0@tiny", **config}
        self.inner = kind(PublisherConfig(**config))
        self.inner.start()

    @property
    def endpoint(self):
        return self.inner.config.endpoint.replace("*", "127.0.0.1")

    @property
    def replay_endpoint(self):
        found = self.inner.config.replay_endpoint
        return found and found.replace("*", "127.0.0.1")

    def publish(self, count=1):
        for _ in range(count):
            self.inner.publish(f"{self.life}{self.count}".encode())
            self.count += 1

    def lose(self, count):
        self.inner.dropping = count
        self.publish(count)

    def stop(self):
        self.inner.close()

    async def restart(self, life):
        """Come back as another engine on the same ports, which take a moment to be free."""
        self.life, self.count = life, 0
        async with asyncio.timeout(10):
            while True:
                self.inner = self.kind(self.inner.config)
                try:
                    return self.inner.start()
                except ConfigError:
                    await asyncio.sleep(0.01)


class Line:
    """A TCP connection's way to a port, which can be cut and mended."""

    def __init__(self, endpoint):
        self.target = int(endpoint.rpartition(":")[2])
        self.port = 0
        self.writers = []

    @property
    def endpoint(self):
        return f"tcp://127.0.0.1:{self.port}"

    async def mend(self):
        self.server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)
        self.port = self.server.sockets[0].getsockname()[1]
        return self

    async def cut(self):
        self.server.close()
        for writer in self.writers:
            writer.transport.abort()
        self.writers.clear()
        await self.server.wait_closed()

    async def _relay(self, reader, writer):
        there, back = await asyncio.open_connection("127.0.0.1", self.target)
        self.writers += [writer, back]
        await asyncio.gather(self._pass_on(reader, back), self._pass_on(there, writer))

    async def _pass_on(self, reader, writer):
        try:
            while data := await reader.read(65_536):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        writer.transport.abort()


def batches(life, first, last):
    return [(seq, f"{life}{seq}") for seq in range(first, last + 1)]


def stream_of(publisher, sink, **settings):
    settings = {"topic": "kv@r0@tiny", "replay_endpoint": publisher.replay_endpoint, **settings}
    return EventStream(publisher.endpoint, sink=sink, replay_silence_s=0.5, **settings)


async def connected(stream, times=1):
    """Wait until the stream is connected and has asked whatever it wanted to."""
    async with asyncio.timeout(15):
        while stream.counters.connections < times or not stream.is_settled:
            await asyncio.sleep(0.005)


def raw_publisher(endpoint=None):
    """A PUB socket that sends whatever frames it is told to, bound to a free port or to `endpoint`."""
    socket = zmq.Context.instance().socket(zmq.PUB)
    socket.setsockopt(zmq.LINGER, 0)
    socket.bind(endpoint or "tcp://127.0.0.1:*")
    return socket, socket.getsockopt_string(zmq.LAST_ENDPOINT)
