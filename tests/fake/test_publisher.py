"""The publisher of a simulated replica, over real sockets; more in tests/adapters/test_vllm_events.py."""

from __future__ import annotations

import pytest
import zmq

from kvroute.errors import ConfigError
from kvroute.fake.publisher import EventPublisher, PublisherConfig


@pytest.fixture
async def publish():
    """Make a publisher with some settings, started."""
    made = []

    def start(**settings):
        made.append(EventPublisher(PublisherConfig(**settings)))
        made[-1].start()
        return made[-1]

    yield start
    for publisher in made:
        publisher.close()


async def test_free_ports_are_shown(publish):
    """Port 0 takes one, and the settings then name it."""
    config = publish(endpoint="tcp://*:0", replay_endpoint="tcp://*:0").config
    for endpoint in (config.endpoint, config.replay_endpoint):
        address, _, port = endpoint.rpartition(":")
        assert address == "tcp://*"
        assert int(port) > 0


async def test_an_endpoint_with_a_host_is_dialled(publish):
    """vLLM's rule: the subscriber has to bind."""
    sub = zmq.Context.instance().socket(zmq.SUB)
    sub.setsockopt(zmq.SUBSCRIBE, b"")
    sub.bind("tcp://127.0.0.1:*")
    endpoint = sub.getsockopt_string(zmq.LAST_ENDPOINT)
    publisher = publish(endpoint=endpoint)
    assert publisher.config.endpoint == endpoint
    frames = None
    for number in range(2_000):
        publisher.publish(b"%d" % number)
        if sub.poll(5):
            frames = sub.recv_multipart()
            break
    assert frames is not None
    assert frames == [b"", int(frames[2]).to_bytes(8, "big"), frames[2]]
    sub.close(0)


@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
async def test_a_port_that_is_taken_is_a_clear_error(publish, field):
    """And nothing stays open."""
    taken = publish(endpoint="tcp://*:0").config.endpoint
    with pytest.raises(ConfigError, match="kv_events: cannot use"):
        EventPublisher(PublisherConfig(**{"endpoint": "tcp://*:0", field: taken})).start()
