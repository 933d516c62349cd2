"""Endpoints of event streams, from the engine's side to ours."""

from __future__ import annotations

import json

import pytest

from kvroute.adapters.event_sources import EventSource, at_rank, configured_source, event_sources

CONFIG = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:18270",
    "replay_endpoint": "tcp://*:18275",
    "buffer_steps": 10000,
    "hwm": 100000,
    "max_queue_size": 100000,
    "topic": "kv@r7@tiny",
}


def body(**ranks):
    return json.dumps({rank.removeprefix("r"): {**CONFIG, **fields} for rank, fields in ranks.items()}).encode()


def test_each_rank_has_the_endpoints_that_it_resolved():
    """In the order of ranks, at the replica's host."""
    found = event_sources(body(r1={"endpoint": "tcp://*:18271", "replay_endpoint": "tcp://*:18276"}, r0={}), "gpu1")
    assert found == [
        EventSource(0, "tcp://gpu1:18270", "tcp://gpu1:18275", "kv@r7@tiny"),
        EventSource(1, "tcp://gpu1:18271", "tcp://gpu1:18276", "kv@r7@tiny"),
    ]


@pytest.mark.parametrize("wildcard", ["*", "0.0.0.0", "[::]"])
@pytest.mark.parametrize(("host", "shown"), [("10.0.0.5", "10.0.0.5"), ("fd00::5", "[fd00::5]")])
def test_a_wildcard_becomes_the_replicas_host(wildcard, host, shown):
    """In both families."""
    (found,) = event_sources(body(r0={"endpoint": f"tcp://{wildcard}:5557", "replay_endpoint": None}), host)
    assert (found.endpoint, found.replay_endpoint) == (f"tcp://{shown}:5557", None)


def test_an_address_that_the_engine_took_itself_stays():
    """Where it was given port 0."""
    (found,) = event_sources(body(r0={"endpoint": "tcp://10.1.2.3:40001"}), "gpu1")
    assert found.endpoint == "tcp://10.1.2.3:40001"


def test_engines_that_dial_are_waited_for_at_their_port():
    """On every interface of ours; replays are asked for at the engine all the same."""
    (found,) = event_sources(body(r0={"endpoint": "tcp://router:5557"}), "gpu1", engines_dial=True)
    assert (found.endpoint, found.is_bound) == ("tcp://*:5557", True)
    assert found.replay_endpoint == "tcp://gpu1:18275"


@pytest.mark.parametrize("off", [{"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_ranks_that_publish_nothing_are_left_out(off):
    """Whichever switch is off."""
    assert event_sources(body(r0=off), "gpu1") == []


def test_without_a_buffer_there_is_no_replay():
    """An empty buffer answers every question as a new engine would."""
    (found,) = event_sources(body(r0={"buffer_steps": 0}), "gpu1")
    assert found.replay_endpoint is None


@pytest.mark.parametrize("wrong", [b"", b"[]", b'{"x": {}}', b'{"0": {"endpoint": 5}}', b'{"0": null}'])
def test_another_form_is_an_error(wrong):
    """Not an empty list, which would mean that there are no events."""
    with pytest.raises(ValueError, match=r"JSON|[Ee]xpected|Input"):
        event_sources(wrong, "gpu1")


def test_configured_endpoints_are_those_of_rank_zero():
    """Engines before 0.31 cannot be asked; their ranks count ports up."""
    found = configured_source(2, "tcp://*:5557", "tcp://*:5600", "kv", "gpu1")
    assert found == EventSource(2, "tcp://gpu1:5559", "tcp://gpu1:5602", "kv")
    assert configured_source(1, "tcp://*:5557", None, "", "gpu1").replay_endpoint is None


def test_other_kinds_of_endpoints():
    """An inproc name gets a suffix; a socket file cannot be shared by ranks."""
    assert at_rank("inproc://kv", 1) == "inproc://kv_dp1"
    assert at_rank("ipc:///run/kv", 0) == "ipc:///run/kv"
    for wrong in ("ipc:///run/kv", "tcp://gpu1"):
        with pytest.raises(ValueError, match="rank 1"):
            at_rank(wrong, 1)
