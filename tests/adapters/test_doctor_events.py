"""Listening to real publishers: what is heard while something happens, and whether it is given again."""

import asyncio

import aiohttp
import msgspec
import pytest

from kvroute.adapters.doctor_events import EventEndpoints, hearing, sources_of
from kvroute.adapters.event_sources import EventSource
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.errors import ConfigError
from kvroute.fake.publisher import EventPublisher, PublisherConfig
from kvroute.fake.server import build_replica, serve_replica
from kvroute.routing.findings import EventsFacts
from tests.adapters.between import between
from tests.processes import free_port

STORED = msgspec.msgpack.encode([1.0, [["BlockStored", [7], None, list(range(32)), 32, None, "GPU"]], 0])


class Engine:
    """A publisher, and the source by which it is reached."""

    def __init__(self, replay="tcp://*:0"):
        self.publisher = EventPublisher(PublisherConfig(endpoint="tcp://*:0", replay_endpoint=replay, topic="kv@m"))
        self.publisher.start()
        config = self.publisher.config
        replay_endpoint = config.replay_endpoint and config.replay_endpoint.replace("*", "127.0.0.1")
        self.source = EventSource(0, config.endpoint.replace("*", "127.0.0.1"), replay_endpoint, "kv@m")


@pytest.fixture
async def engine():
    engine = Engine()
    yield engine
    engine.publisher.close()


async def heard(source, happens):
    """Listen while something happens."""
    async with hearing(source, EventsFacts(published=True)) as ears:
        happens()
    return ears.facts


async def test_what_happens_meanwhile_is_heard(engine):
    """Batches are counted, block sizes are read, and the newest batch is given again."""
    engine.publisher.publish(b"before anybody listened")
    facts = await heard(engine.source, lambda: [engine.publisher.publish(one) for one in (STORED, b"no batch")])
    assert (facts.heard, facts.block_sizes, facts.is_replayed, facts.trouble) == (2, (32,), True, "")


async def test_another_topic_is_not_heard(engine):
    """A stream that is there and says nothing to us is silent."""
    source = msgspec.structs.replace(engine.source, topic="other")
    assert (await heard(source, lambda: engine.publisher.publish(STORED))).heard == 0


async def test_a_replay_that_nobody_answers(engine):
    """The stream is heard; the other port is not there."""
    source = msgspec.structs.replace(engine.source, replay_endpoint=f"tcp://127.0.0.1:{free_port()}")
    facts = await heard(source, lambda: engine.publisher.publish(STORED))
    assert (facts.heard, facts.is_replayed) == (1, False)


async def test_without_replay_nothing_is_asked():
    """None is neither yes nor no."""
    engine = Engine(replay=None)
    facts = await heard(engine.source, lambda: engine.publisher.publish(STORED))
    engine.publisher.close()
    assert (facts.heard, facts.is_replayed, facts.replay_endpoint) == (1, None, "")


async def test_nobody_publishes():
    """No connection is trouble, and what was to happen happens nevertheless."""
    happened = []
    source = EventSource(0, f"tcp://127.0.0.1:{free_port()}", None, "")
    facts = await heard(source, lambda: happened.append(1))
    assert (facts.heard, happened) == (None, [1])
    assert "no connection" in facts.trouble


async def test_an_endpoint_that_is_none():
    """It is trouble, not an end."""
    facts = await heard(EventSource(0, "tcp://127.0.0.1:port", None, ""), lambda: None)
    assert "cannot be listened to" in facts.trouble


async def test_no_source():
    """Nothing is done then."""
    assert await heard(None, lambda: None) == EventsFacts(published=True)


async def test_endpoints_that_are_given_are_those_of_rank_0():
    """Other ranks have the ports above; a wildcard is the replica's host."""
    client = ReplicaClient(None, "http://gpu1:8000", None, 1.0)
    found = await sources_of(client, EventEndpoints("tcp://*:5557", "tcp://*:5657"), [0, 1])
    assert [(one.endpoint, one.replay_endpoint) for one in found.values()] == [
        ("tcp://gpu1:5557", "tcp://gpu1:5657"),
        ("tcp://gpu1:5558", "tcp://gpu1:5658"),
    ]
    with pytest.raises(ConfigError, match="`events`"):
        await sources_of(client, EventEndpoints("ipc:///tmp/x"), [0, 1])


async def test_the_only_engine_behind_a_url_may_have_any_rank():
    """Under an external balancer each server is one rank, and counts itself as rank 0 or as its own number."""
    config = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5560"}

    def edit(path, status, body):
        return 200, msgspec.json.encode({"3": config})

    runner, replica = await serve_replica(build_replica())
    try:
        async with between([replica], edit) as url, aiohttp.ClientSession() as session:
            found = await sources_of(ReplicaClient(session, url, None, 5.0), EventEndpoints(), [0])
    finally:
        await runner.cleanup()
    assert {rank: one.endpoint for rank, one in found.items()} == {0: "tcp://127.0.0.1:5560"}


async def test_a_publisher_may_come_late(engine):
    """What is sent a moment after the block is over is heard as well: events follow the answer."""
    loop = asyncio.get_running_loop()
    facts = await heard(engine.source, lambda: loop.call_later(0.3, engine.publisher.publish, STORED))
    assert facts.heard == 1
