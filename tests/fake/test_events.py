"""The events of a simulated replica: against frames recorded from a real vLLM, and as a router hears them."""

from __future__ import annotations

import asyncio
import json
import signal
from contextlib import AsyncExitStack

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from kvroute.adapters.event_sources import event_sources
from kvroute.adapters.vllm_events import EventStream
from kvroute.fake import events as module
from kvroute.fake.events import EventFeed, Story
from kvroute.fake.publisher import EventPublisher, PublisherConfig
from kvroute.kv.chain import chain_of, hashes_of, root_of, tokens_of
from kvroute.kv.pool import Cleared, Removed, Stored
from tests.adapters.publishers import Log, connected
from tests.data_files import DATA
from tests.processes import SimulatedReplica, free_port

RECORDED = json.loads((DATA / "events" / "vllm-0.32.json").read_text())
TOPIC = "kv@r0@tiny"
EVENTS = PublisherConfig(endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic=TOPIC)


class Batches(Log):
    """A sink that decodes."""

    def batch(self, seq, payload):
        self.told.append(msgspec.msgpack.decode(payload))

    @property
    def events(self):
        return [event for batch in self.told if batch != "new life" for event in batch[1]]

    @property
    def kinds(self):
        return [event["type"] for event in self.events]

    async def until(self, holds):
        async with asyncio.timeout(15):
            while not holds():
                await asyncio.sleep(0.005)


@pytest.fixture
async def hear(serve):
    """Serve a replica that publishes, and return a session and what a stream of its events hears, connected."""
    async with AsyncExitStack() as stack:

        async def start(**settings):
            session = await serve(model="tiny", **{"events": EVENTS, "faults": True, **settings})
            log = Batches()
            stream = await stack.enter_async_context(streaming(session, log))
            await connected(stream)
            return session, log, stream

        yield start


class streaming:
    """The stream of a replica's rank 0, as a context."""

    def __init__(self, session, sink):
        self.session, self.sink = session, sink

    async def __aenter__(self):
        async with self.session.get("/kv_event_sources") as response:
            (source,) = event_sources(await response.read(), "127.0.0.1")
        self.stream = EventStream(
            source.endpoint, sink=self.sink, replay_endpoint=source.replay_endpoint, topic=source.topic, check_s=0.2
        )
        await self.stream.start()
        return self.stream

    async def __aexit__(self, *_):
        await self.stream.close()


async def complete(session, body, **headers):
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        assert response.status == 200, await response.text()
        return (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]


async def replayed(session):
    """Every kept message, as frames, the end mark last."""
    async with session.get("/kv_event_sources") as response:
        endpoint = (await response.json())["0"]["replay_endpoint"].replace("*", "127.0.0.1")
    dealer = zmq.asyncio.Socket(zmq.Context.instance(), zmq.DEALER)
    dealer.connect(endpoint)
    await dealer.send_multipart([bytes.fromhex(frame) for frame in RECORDED["replay"]["question"]])
    found = [await dealer.recv_multipart()]
    while found[-1][2] != b"\xff" * 8:
        found.append(await dealer.recv_multipart())
    dealer.close(0)
    return found


class Comparison:
    """Recorded against simulated batches: equal but for times, what the models said, and the names of blocks."""

    def __init__(self):
        self.names = {}  # their block hash -> ours

    def same(self, theirs, ours, *, is_said):
        """Assert that two payloads say the same. `is_said`: blocks of the answer may be in them."""
        theirs, ours = msgspec.msgpack.decode(theirs), msgspec.msgpack.decode(ours)
        assert [type(part) for part in theirs] == [type(part) for part in ours] == [float, list, int]
        assert theirs[2] == ours[2]
        assert len(theirs[1]) == len(ours[1])
        for their_event, our_event in zip(theirs[1], ours[1], strict=True):
            assert list(their_event) == list(our_event), "keys, in order"
            self._same_event(their_event, our_event, is_said)

    def _same_event(self, theirs, ours, is_said):
        for key, value in theirs.items():
            if key == "block_hashes":
                assert [self._name(*pair) for pair in zip(value, ours[key], strict=True)] == ours[key]
            elif key == "parent_block_hash" and value is not None:
                assert self.names[value] == ours[key]
            elif key == "token_ids" and is_said:
                assert len(ours[key]) == len(value)
            else:
                assert ours[key] == value

    def _name(self, theirs, ours):
        return self.names.setdefault(theirs, ours)


async def perform(session, requests):
    for request in requests:
        if request.get("reset"):
            async with session.post("/reset_prefix_cache") as response:
                assert (await response.json())["success"]
        else:
            assert await complete(session, request["body"], **request["headers"]) == request["cached_tokens"]


async def test_live_frames_are_the_recorded_ones(serve):
    """Topic, number, and every key and value of each event; cached tokens too. Only block hashes have other names."""
    session = await serve(model="tiny", block_size=32, kv_tokens=262_144, max_model_len=8192, events=EVENTS)
    sub = zmq.asyncio.Socket(zmq.Context.instance(), zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    async with session.get("/kv_event_sources") as response:
        sub.connect((await response.json())["0"]["endpoint"].replace("*", "127.0.0.1"))
    warm = 0
    while not await sub.poll(50):  # until the publisher knows of the subscription
        await complete(session, {"prompt": [10_000 + warm] * 33, "max_tokens": 1})
        warm += 1
    comparison, expected = Comparison(), int.from_bytes((await sub.recv_multipart())[1], "big") + 1
    for scenario in RECORDED["roomy"]:
        await perform(session, scenario["requests"])
        is_said = any(request.get("body", {}).get("max_tokens", 1) > 1 for request in scenario["requests"])
        for frames in scenario["messages"]:
            topic, seq, payload = await sub.recv_multipart()
            assert (topic.hex(), int.from_bytes(seq, "big")) == (frames[0], expected)
            comparison.same(bytes.fromhex(frames[2]), payload, is_said=is_said)
            expected += 1
    assert not await sub.poll(50), "more than was recorded"
    assert len(set(comparison.names.values())) == len(comparison.names)
    sub.close(0)


async def test_evictions_and_replay_are_the_recorded_ones(serve):
    """In a cache of 40 blocks, filled over and over: removals, duplicates and stores in the same order."""
    tight = RECORDED["tight"]
    session = await serve(model="tiny", block_size=32, kv_tokens=tight["num_blocks"] * 32, events=EVENTS)
    for scenario in tight["scenarios"]:
        await perform(session, scenario["requests"])
    *ours, end = await replayed(session)
    theirs = [frames for scenario in tight["scenarios"] for frames in scenario["messages"]]
    comparison = Comparison()
    for frames, (empty, topic, seq, payload) in zip(theirs, ours, strict=True):
        assert (empty, topic, seq.hex()) == (b"", TOPIC.encode(), frames[1])
        comparison.same(bytes.fromhex(frames[2]), payload, is_said=False)
    assert [frame.hex() for frame in end] == RECORDED["replay"]["end"]


async def test_sources_are_shown_as_vllm_shows_them(serve):
    """With the ports that were taken; without events there are none."""
    recorded = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "buffer_steps": 10000,
        "hwm": 100000,
        "max_queue_size": 100000,
        "topic": TOPIC,
    }
    async with (await serve(events=EVENTS)).get("/kv_event_sources") as response:
        shown = (await response.json())["0"]
    assert shown == recorded | {name: shown[name] for name in ("endpoint", "replay_endpoint")}
    async with (await serve()).get("/kv_event_sources") as response:
        assert await response.json() == {}


async def test_lost_batches_are_not_sent_and_can_be_replayed(hear):
    """The order loses so many; the stream finds them."""
    session, log, stream = await hear()
    for number in range(6):
        if number == 2:
            async with session.post("/_fault", json={"kind": "lose_events", "count": 3}) as response:
                assert response.status == 200
        await complete(session, {"prompt": [number + 1] * 17, "max_tokens": 1})
    await log.until(lambda: len(log.events) == 6)
    assert [event["token_ids"][0] for event in log.events] == [1, 2, 3, 4, 5, 6]
    assert stream.counters.received < 6


async def test_a_busy_reset_clears_nothing_and_an_idle_one_is_told_with_the_next_step(hear):
    """Which is the next request's."""
    session, log, _ = await hear(speed=1)
    body = {"prompt": [7] * 33, "max_tokens": 4000, "ignore_eos": True, "stream": True}
    async with session.post("/v1/completions", json=body) as response:
        await response.content.readline()
        async with session.post("/reset_prefix_cache") as reset:
            assert (await reset.json()) == {"success": False}
    while True:
        async with session.post("/reset_prefix_cache") as reset:
            if (await reset.json())["success"]:
                break
    assert "AllBlocksCleared" not in log.kinds
    await complete(session, {"prompt": [8] * 17, "max_tokens": 1})
    await log.until(lambda: log.kinds[-2:] == ["AllBlocksCleared", "BlockStored"])


async def test_without_events_none_can_be_lost(serve):
    """The error says how to have some."""
    session = await serve(faults=True)
    async with session.post("/_fault", json={"kind": "lose_events"}) as response:
        assert response.status == 400
        assert "--kv-events" in (await response.json())["error"]["message"]


async def test_a_killed_replica_that_comes_back_on_its_ports_is_a_new_life(tmp_path):
    """`kvroute replica`, ended at once and started again; its stream goes on with the new one's first batch."""
    ports = [str(free_port()) for _ in range(3)]
    flags = ["--kv-events", f"tcp://*:{ports[1]}", "--kv-events-replay", f"tcp://*:{ports[2]}", "--speed", "50"]
    flags += ["--kv-events-topic", TOPIC, "--model", "tiny"]
    log = Batches()
    with SimulatedReplica(*flags, log=tmp_path / "first.log", port=int(ports[0])) as first:
        async with aiohttp.ClientSession(first.url) as session, streaming(session, log) as stream:
            for number in range(3):
                await complete(session, {"prompt": [number + 1] * 17, "max_tokens": 1})
            await log.until(lambda: len(log.events) == 3)
            first.signal(signal.SIGKILL)
            with SimulatedReplica(*flags, log=tmp_path / "second.log", port=int(ports[0])) as second:
                async with aiohttp.ClientSession(second.url) as again:
                    for number in range(5):
                        await complete(again, {"prompt": [number + 10] * 17, "max_tokens": 1})
                await log.until(lambda: log.events[-1]["token_ids"][0] == 14)
            assert stream.sequence_counters.new_lives == 1
    life = log.told.index("new life")
    said = [batch[1][0]["token_ids"][0] for batch in log.told[life + 1 :]]
    assert (len(log.told[:life]), said) == (3, [10, 11, 12, 13, 14])


BLOCK = 4


@pytest.fixture
async def feed():
    """A feed with a publisher whose batches are read back from what it keeps."""
    publisher = EventPublisher(PublisherConfig(endpoint="tcp://*:0"))
    publisher.start()
    yield EventFeed(publisher, BLOCK)
    publisher.close()


def story(*ids, **fields):
    tokens = tokens_of(ids)
    return Story(chain=chain_of(tokens, BLOCK, root_of("m")), tokens=tokens, **fields)


def published(feed):
    return [msgspec.msgpack.decode(payload)[1] for _, payload in feed.publisher._kept]


async def test_a_step_without_changes_publishes_nothing(feed):
    """As at vLLM, where a batch is sent only if there were events."""
    feed.stepped([])
    assert published(feed) == []


async def test_blocks_are_told_with_the_tokens_of_whoever_has_them(feed):
    """Also where the first sequence with that prefix has left, and in one that goes on differently."""
    first, second = story(*range(12)), story(*range(8), 90, 91, 92, 93)
    feed.joined("a", first)
    feed.joined("b", second)
    feed.left("a")
    for _ in range(3):
        feed.stepped([])
    assert feed.known == 1
    hashes = list(hashes_of(second.chain))
    feed.stepped([Stored(tuple(hashes[1:]), hashes[0]), Removed(hashes[2]), Cleared()])
    ((stored, removed, cleared),) = published(feed)
    assert (stored["token_ids"], stored["parent_block_hash"]) == ([4, 5, 6, 7, 90, 91, 92, 93], hashes[0])
    assert (removed["block_hashes"], cleared) == ([hashes[2]], {"type": "AllBlocksCleared"})


async def test_the_salt_is_told_with_the_first_block_only(feed):
    """As extra keys."""
    salted = story(*range(8), cache_salt="s")
    feed.joined("a", salted)
    feed.stepped([Stored(tuple(hashes_of(salted.chain)), None)])
    assert published(feed)[0][0]["extra_keys"] == [["s"], None]


async def test_what_left_in_a_step_is_known_until_its_events_are_out(feed, monkeypatch):
    """And those who come and go at a hung engine leave nothing behind."""
    monkeypatch.setattr(module, "LEFT_LIMIT", 2)
    for number in range(5):
        feed.joined(f"r{number}", story(*range(number, number + 4)))
        feed.left(f"r{number}")
    assert feed.known == 2
    hashes = tuple(hashes_of(story(*range(4)).chain))
    feed.stepped([Stored(hashes, None)])
    assert published(feed)[0][0]["token_ids"] == [0, 1, 2, 3]
    feed.stepped([])
    assert feed.known == 0
