"""One engine's KV events as `kvroute doctor` hears them: dialled before the hash probe, counted until shortly after it.

The stream is read as the router reads it, but for replays: what counts is what arrives by itself. Afterwards the replay
socket is asked for the last batch that was heard, and has to give the same bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from urllib.parse import urlsplit

import zmq
from msgspec import Struct
from msgspec.structs import replace

from kvroute.adapters import event_replay
from kvroute.adapters.event_sources import EventSource, configured_source, event_sources
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.adapters.vllm_events import EventStream
from kvroute.errors import ConfigError, ReplicaFailed
from kvroute.kv.events import BlocksStored, MalformedBatch, decode_batch
from kvroute.routing.findings import EventsFacts

CONNECTED_S = 2.0  # until a connection is there
SUBSCRIBED_S = 0.2  # for the subscription to reach the publisher, of which no answer tells
HEARD_S = 2.0  # for the probe's events to come after its answer; an engine's publisher looks ten times a second
LOOK_S = 0.02


class EventEndpoints(Struct, frozen=True):
    """Where engines publish, as --kv-events-config of rank 0 has it."""

    endpoint: str | None = None  # None: each replica says itself
    replay_endpoint: str | None = None
    topic: str = ""
    engines_dial: bool = False  # they connect to us: the endpoint's port is bound here


async def sources_of(client: ReplicaClient, given: EventEndpoints, ranks: list[int]) -> dict[int, EventSource] | None:
    """Return each rank's stream, as the caller says, else as the replica does; None where neither does.

    Raises:
        ConfigError: the endpoints that were given cannot be those of all ranks.
    """
    host = urlsplit(client.url).hostname or ""
    try:
        if given.endpoint is not None:
            ends = (given.endpoint, given.replay_endpoint, given.topic, host)
            return {rank: configured_source(rank, *ends, engines_dial=given.engines_dial) for rank in ranks}
    except ValueError as error:
        raise ConfigError(f"`events`: {error}") from None
    try:
        answer = await client.answered("GET", "/kv_event_sources")
        dial = given.engines_dial
        found = event_sources(answer.body, host, engines_dial=dial) if answer.status == 200 else None
    except (ReplicaFailed, ValueError):
        return None
    if found is None:
        return None
    if len(ranks) == len(found) == 1:
        return {ranks[0]: found[0]}  # an engine that is addressed by its URL alone may have any rank
    return {source.rank: source for source in found}


class Ears(Struct):
    """A sink that counts: what the stream brought so far."""

    batches: int = 0
    last: tuple[int, bytes] | None = None  # number and bytes of the newest batch
    block_sizes: set[int] = set()  # of the blocks that were stored

    def batch(self, seq: int, payload: bytes) -> None:
        """Take the next batch."""
        self.batches += 1
        self.last = (seq, payload)
        try:
            events = decode_batch(payload).events
        except MalformedBatch:
            return
        self.block_sizes |= {one.block_size for one in events if isinstance(one, BlocksStored) and one.block_size}

    def new_life(self) -> None:
        """Begin again: batches that were heard remain heard."""

    def gap(self, first: int, last: int) -> None:
        """Take note of nothing: without replay a gap says only that others were served meanwhile."""


class Hearing:
    """What is known of one engine's events; complete when the `with` block is over."""

    def __init__(self, facts: EventsFacts) -> None:
        self.facts = facts


@asynccontextmanager
async def hearing(source: EventSource | None, facts: EventsFacts) -> AsyncIterator[Hearing]:
    """Listen for as long as the block runs, and a moment longer; nothing is done where there is no source."""
    heard = Hearing(facts)
    if source is None:
        yield heard
        return
    ears = Ears()
    facts = replace(facts, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint or "")
    stream = EventStream(source.endpoint, sink=ears, topic=source.topic, bind=source.is_bound)
    try:
        await stream.start()
    except zmq.ZMQError as error:
        heard.facts = replace(facts, trouble=f"{source.endpoint} cannot be listened to: {error}")
        yield heard
        return
    try:
        trouble = ""
        if await _until(lambda: stream.counters.connections > 0, CONNECTED_S):
            await asyncio.sleep(SUBSCRIBED_S)
        else:
            trouble = f"no connection to {source.endpoint} in {CONNECTED_S:g} s"
        heard.facts = replace(facts, trouble=trouble)
        yield heard
        if not trouble:
            await _until(lambda: ears.batches > 0, HEARD_S)
            heard.facts = replace(
                facts,
                heard=ears.batches,
                block_sizes=tuple(sorted(ears.block_sizes)),
                is_replayed=await _replayed(source.replay_endpoint, ears.last),
            )
    finally:
        await stream.close()


async def _until(true: Callable[[], bool], timeout_s: float) -> bool:
    """Wait until something that others count is so; False where it was not in time."""
    loop = asyncio.get_running_loop()
    end_s = loop.time() + timeout_s
    while not true():
        if loop.time() > end_s:
            return False
        await asyncio.sleep(LOOK_S)
    return True


async def _replayed(endpoint: str | None, last: tuple[int, bytes] | None) -> bool | None:
    """Return whether the replay socket gives the newest batch once more; None where it cannot be asked."""
    if endpoint is None or last is None:
        return None
    found = False

    def take(seq: int, payload: bytes) -> bool:
        nonlocal found
        found = (seq, payload) == last
        return False

    try:
        await event_replay.ask(zmq.Context.instance(), endpoint, last[0], take)
    except zmq.ZMQError:
        return False
    return found
