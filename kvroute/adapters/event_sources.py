"""Where a replica's event streams are: what `GET /kv_event_sources` answers, or endpoints that were configured.

An engine names endpoints from its own side: `tcp://*:5557` is bound there, and we dial the replica's host. One that
names a host (`tcp://router:5557`) is dialled by the engine, and somebody has to bind it. vLLM's rule is followed:
wildcards, ipc and inproc are bound, all else is dialled; but since 0.31 an engine that was given port 0 shows the
address that it bound. So a host is taken for the engine's own unless the caller says that engines dial.
Sources: vLLM's ZmqEventPublisher (offset_endpoint_port, _bind), PR #55844.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

WILDCARDS = ("*", "0.0.0.0", "[::]", "::")


class EventSource(Struct, frozen=True):
    """One engine rank's stream, as we reach it."""

    rank: int
    endpoint: str  # dialled by us, or bound by us where `is_bound`
    replay_endpoint: str | None  # always dialled; None = the engine keeps nothing for replay
    topic: str
    is_bound: bool = False


class _Config(Struct):
    """The fields of vLLM's KVEventsConfig that matter; others are ignored."""

    enable_kv_cache_events: bool = False
    publisher: str | None = None
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    topic: str = ""


def event_sources(body: bytes, host: str, *, engines_dial: bool = False) -> list[EventSource]:
    """Read the answer of `/kv_event_sources`, by rank. Ranks that publish nothing are left out.

    `host` is the replica's, as we reach it. `engines_dial` says that the engines connect to us.

    Raises:
        ValueError: the answer has another form.
    """
    configs = msgspec.json.decode(body, type=dict[int, _Config])
    found = []
    for rank, config in sorted(configs.items()):
        if config.enable_kv_cache_events and config.publisher in (None, "zmq"):
            found.append(_source(rank, config, host, engines_dial))
    return found


def _source(rank: int, config: _Config, host: str, engines_dial: bool) -> EventSource:
    replay = config.replay_endpoint if config.buffer_steps > 0 else None
    return EventSource(
        rank=rank,
        endpoint=bound_here(config.endpoint) if engines_dial else dialled(config.endpoint, host),
        replay_endpoint=dialled(replay, host) if replay else None,
        topic=config.topic,
        is_bound=engines_dial,
    )


def configured_source(
    rank: int, endpoint: str, replay_endpoint: str | None, topic: str, host: str, *, engines_dial: bool = False
) -> EventSource:
    """Make a rank's source from the endpoints of rank 0, for engines that cannot be asked (before 0.31)."""
    shifted = {"endpoint": at_rank(endpoint, rank), "replay_endpoint": at_rank(replay_endpoint or "", rank) or None}
    config = msgspec.convert({**shifted, "topic": topic}, _Config)
    return _source(rank, config, host, engines_dial)


def at_rank(endpoint: str, rank: int) -> str:
    """Return a rank's endpoint, given that of rank 0: TCP ports are counted up, inproc names get a suffix.

    Raises:
        ValueError: the endpoint has no port, or is of a kind that only rank 0 can have.
    """
    if not endpoint or not rank:
        return endpoint
    if endpoint.startswith("inproc://"):
        return f"{endpoint}_dp{rank}"
    address, _, port = endpoint.rpartition(":")
    if not endpoint.startswith("tcp://") or not port.isdigit():
        raise ValueError(f"event endpoint {endpoint!r} cannot be that of rank {rank}: give tcp://HOST:PORT")
    return f"{address}:{int(port) + rank}"


def dialled(endpoint: str, host: str) -> str:
    """Return an endpoint that an engine binds as others reach it: a wildcard becomes the replica's host."""
    address, port = _tcp(endpoint)
    if address not in WILDCARDS:
        return endpoint
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def bound_here(endpoint: str) -> str:
    """Return an endpoint that an engine dials as we bind it: on every interface."""
    address, port = _tcp(endpoint)
    return f"tcp://*:{port}" if address else endpoint


def _tcp(endpoint: str) -> tuple[str, str]:
    """Split a TCP endpoint into address and port; both empty for other kinds."""
    if not endpoint.startswith("tcp://"):
        return "", ""
    address, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return address, port
