"""Which replicas' KV events are followed, whence they come, and whether they are to be believed.

A replica that answers `GET /kv_event_sources` (vLLM since 0.31) says itself where it publishes; for others the settings
do. The index decides which router listens. A replica that serves while its stream says nothing is set back to what it
was sent, until it speaks; so is one whose blocks do not fit the prompts' (another block size).
"""

from __future__ import annotations

import logging
from typing import Any
from urllib.parse import urlsplit

import zmq
from msgspec import Struct

from kvroute.adapters.event_feed import EventFeed
from kvroute.adapters.event_sources import EventSource, configured_source, event_sources
from kvroute.adapters.index import Index
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.adapters.turns import Turns
from kvroute.adapters.vllm_events import EventStream
from kvroute.errors import ReplicaFailed
from kvroute.kv.event_sequence import EventSink, Position
from kvroute.routing.replica import Load, Replica, ReplicaId

log = logging.getLogger("kvroute.events")

SILENT_BLOCKS = 512  # computed by an engine whose stream says nothing: it publishes elsewhere, or not at all. A request
# that fills no block computes up to two blocks' tokens in vain, so that few of them prove nothing
SILENT_S = 20.0  # and for so long, since metrics are scraped less often than events come
MISFIT_BLOCKS = 64  # of another size than the prompts', and none that fits


class EventSettings(Struct, frozen=True, kw_only=True):
    """Whether and where to listen."""

    is_wanted: bool = True
    is_required: bool = False  # say so where a replica publishes nothing
    endpoint: str | None = (
        None  # of rank 0, as the engine's --kv-events-config has it; wildcards are the replica's host
    )
    replay_endpoint: str | None = None
    topic: str = ""
    engines_dial: bool = False
    reports: bool = True  # after losses, ask engines to tell again what requests find


class FollowerStats(Struct):
    """Counters of all followed replicas."""

    followed: int = 0
    silences: int = 0  # times that a replica served and said nothing
    misfits: int = 0  # replicas whose blocks are of another size than the prompts' are cut into


class _Followed(Struct):
    feed: EventFeed
    source: EventSource
    key: object  # other values begin a new life
    batches: int = 0  # heard, at the time of `since_s`
    computed_tokens: int | None = None  # by the engine, at the time of `since_s`
    since_s: float = 0.0
    is_misfit: bool = False


class Followers:
    """The feeds of one router."""

    def __init__(self, index: Index, settings: EventSettings) -> None:
        self.stats = FollowerStats()
        self._index = index
        self._settings = settings
        self._followed: dict[ReplicaId, _Followed] = {}
        self._turns = Turns()

    @property
    def feeds(self) -> dict[ReplicaId, EventFeed]:
        """The feeds by replica."""
        return {replica: one.feed for replica, one in self._followed.items()}

    async def follow(
        self, client: ReplicaClient, replica: Replica, model: str, block_size: int, capacity_blocks: int
    ) -> None:
        """Follow a replica that the index has admitted, if it publishes. Again with the same values changes nothing."""
        if not self._settings.is_wanted:
            return
        source = await self._source(client, replica)
        if source is None:
            if self._settings.is_required:
                log.warning("%s publishes no KV events, or does not say where: set events.endpoint", replica.id)
            return
        key = (source, model, block_size, capacity_blocks)
        known = self._followed.get(replica.id)
        if known is not None and known.key == key:
            return

        def opened(sink: EventSink, position: Position | None) -> EventStream:
            return EventStream(
                source.endpoint,
                sink=sink,
                replay_endpoint=source.replay_endpoint,
                topic=source.topic,
                position=position,
                bind=source.is_bound,
                turns=self._turns,
            )

        feed = EventFeed(model, capacity_blocks, opened, block_size)
        self._followed[replica.id] = _Followed(feed, source, key)
        self.stats.followed = len(self._followed)
        self._index.follow(replica.id, feed)
        log.info("%s: KV events from %s", replica.id, source.endpoint)

    def leave(self, replica: ReplicaId) -> None:
        """Forget a replica that has left the index."""
        self._followed.pop(replica, None)
        self.stats.followed = len(self._followed)

    def observe(self, replica: ReplicaId, load: Load, now_s: float) -> None:
        """Compare what an engine has computed with what its events said."""
        one = self._followed.get(replica)
        if one is None or not one.feed.is_owner:
            return
        feed = one.feed
        counters = feed.table.counters
        if not one.is_misfit and counters.mismatches > MISFIT_BLOCKS and not counters.stored:
            one.is_misfit = feed.is_silent = True
            self.stats.misfits += 1
            log.warning(
                "%s publishes blocks that are not of %s tokens: its events are of no use", replica, feed.block_size
            )
        computed = load.prefix_queries - load.prefix_hits + load.generation_tokens
        if one.computed_tokens is None or feed.counters.batches != one.batches or computed < one.computed_tokens:
            one.batches, one.computed_tokens, one.since_s = feed.counters.batches, computed, now_s
            if one.is_misfit:
                feed.is_silent = True
            return
        tokens = computed - one.computed_tokens
        if not feed.is_silent and tokens >= SILENT_BLOCKS * (feed.block_size or 16) and now_s >= one.since_s + SILENT_S:
            feed.is_silent = True
            self.stats.silences += 1
            log.warning(
                "%s computed %s tokens and published nothing on %s: until it does, what it was sent says what it holds",
                replica, tokens, one.source.endpoint,
            )  # fmt: skip

    def rebuild(self, replica: ReplicaId) -> None:
        """Begin anew with what an engine still tells, if this router listens to it."""
        one = self._followed.get(replica)
        if one is not None and one.feed.is_exact:
            one.feed.rebuild()

    def describe(self, replica: ReplicaId) -> dict[str, Any]:
        """Return what an operator wants to know about a replica's events."""
        one = self._followed.get(replica)
        exact = self._index.is_exact(replica)
        if one is None:
            return {"events": "owned elsewhere" if exact else "none"}
        feed = one.feed
        state = "exact" if exact else "silent" if feed.is_silent else "not heard yet"
        row: dict[str, Any] = {"events": state, "owner": feed.is_owner, "endpoint": one.source.endpoint}
        if feed.is_owner:
            position = feed.position
            row |= {"sequence": position.seq if position else None, "replay": one.source.replay_endpoint is not None}
            row |= feed.describe()
        return row

    async def _source(self, client: ReplicaClient, replica: Replica) -> EventSource | None:
        host = urlsplit(client.url).hostname or ""
        rank, settings = replica.rank or 0, self._settings
        try:
            if settings.endpoint is not None:
                return configured_source(
                    rank,
                    settings.endpoint,
                    settings.replay_endpoint,
                    settings.topic,
                    host,
                    engines_dial=settings.engines_dial,
                )
            answer = await client.answered("GET", "/kv_event_sources")
            if answer.status != 200:
                return None
            found = event_sources(answer.body, host, engines_dial=settings.engines_dial)
        except (ReplicaFailed, ValueError, zmq.ZMQError) as error:
            log.info("%s does not say where its KV events are: %s", replica.id, error)
            return None
        if replica.rank is None and len(found) == 1:
            return found[0]  # an engine that is addressed by its URL alone may have any rank
        return next((source for source in found if source.rank == rank), None)
