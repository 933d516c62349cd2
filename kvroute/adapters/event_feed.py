"""One replica's KV events as this router takes part in them: as the stream's owner, who listens, or as nobody yet.

The owner decodes batches into a table (`kv.engine_hashes`) the moment they arrive; what the table changes waits there
until the index takes it, so that a slow store costs no memory and no event. A batch that cannot be read is lost, like
one that never came. Who the owner is, and where changes go, is the index's business.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any, Protocol

import msgspec
import zmq
from msgspec import Struct

from kvroute.kv.block_tree import TIERS
from kvroute.kv.cells import Changes
from kvroute.kv.chain import PrefixChain, blocks_in
from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.event_sequence import EventSink, Position
from kvroute.kv.events import MalformedBatch, decode_batch

log = logging.getLogger(__name__)

OPEN_AGAIN_S = 5.0  # before a stream that could not be opened is tried again, by whoever is to listen


class Stream(Protocol):
    """What a feed needs of `vllm_events.EventStream`."""

    replay_endpoint: str | None

    @property
    def position(self) -> Position | None: ...

    @property
    def is_settled(self) -> bool: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def rewind(self, position: Position | None) -> None: ...


class FeedCounters(Struct):
    """Totals since this router began to watch the replica."""

    batches: int = 0
    malformed: int = 0
    lives: int = 0  # times that the engine was found to have restarted
    gaps: int = 0
    takeovers: int = 0  # times that this router became the owner


class EventFeed:
    """The events of one engine. `open_stream` makes the stream to listen to, given its sink and where to resume."""

    def __init__(
        self,
        model: str,
        capacity_blocks: int,
        open_stream: Callable[[EventSink, Position | None], Stream],
        block_size: int | None = None,
    ) -> None:
        self.counters = FeedCounters()
        self.model = model
        self.capacity_blocks = capacity_blocks
        self.block_size = block_size
        self.table = EngineHashes(model, capacity_blocks, block_size)
        self.is_speaking = False  # events were heard, or a predecessor heard them: they say what the replica holds
        self.is_astray = False  # the store may have what a predecessor wrote last, and nobody will correct that
        self.is_silent = False  # it serves and says nothing: until it does, its events say nothing about what it holds
        self.changed: Callable[[], None] = _nobody
        self._open_stream = open_stream
        self._stream: Stream | None = None
        self._is_resumed = False  # from a snapshot, and neither a loss nor a new life was heard of since

    def __repr__(self) -> str:
        return f"<EventFeed {'owned' if self.is_owner else 'not owned'}: {self.table!r}>"

    @property
    def is_owner(self) -> bool:
        """Whether this router listens to the stream."""
        return self._stream is not None

    @property
    def is_exact(self) -> bool:
        """Whether the table says what the replica holds."""
        return self.is_owner and self.is_speaking and not self.is_silent

    @property
    def is_settled(self) -> bool:
        """Whether the stream waits for no replay."""
        return self._stream is not None and self._stream.is_settled

    @property
    def position(self) -> Position | None:
        """The last batch in the table."""
        return self._stream.position if self._stream else None

    async def own(self, snapshot: bytes | None = None, position: Position | None = None) -> None:
        """Listen, from where a predecessor's snapshot ends, or from as far back as the engine still tells.

        Raises:
            ValueError: the snapshot cannot be read; nothing is listened to.
            OSError: the stream cannot be opened; nothing is listened to.
        """
        await self.release()
        if snapshot is None:
            self.table = EngineHashes(self.model, self.capacity_blocks, self.block_size)
        else:  # a hundred milliseconds for ten thousand blocks, which requests must not wait for
            self.table = await asyncio.to_thread(EngineHashes.unpack, snapshot, self.model, self.capacity_blocks)
        self.is_speaking, self.is_silent = snapshot is not None, False
        self._is_resumed, self.is_astray = snapshot is not None, self.table.can_learn  # from what others never hear
        self.counters.takeovers += 1
        stream = self._open_stream(self, position if snapshot is not None else None)
        try:
            await stream.start()
        except zmq.ZMQError as error:
            raise OSError(error.errno, f"events cannot be heard: {error}") from error
        self._stream = stream

    async def release(self) -> None:
        """Stop listening; the table is no longer kept."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.close()
            self.table = EngineHashes(self.model, self.capacity_blocks, self.block_size)
        self.is_speaking = False

    def batch(self, seq: int, payload: bytes) -> None:
        """Take the next batch in."""
        try:
            batch = decode_batch(payload)
        except MalformedBatch as error:
            self.counters.malformed += 1
            log.warning("batch %s: %s", seq, error)
            self.gap(seq, seq)
            return
        self.counters.batches += 1
        self.is_speaking, self.is_silent = True, False
        try:
            self.table.apply(batch)
        except Exception:
            self.table.clear()  # it may have taken in half of it
            self.is_astray = True
            raise
        finally:
            self.changed()

    def new_life(self) -> None:
        """The engine restarted: its cache is empty."""
        self.counters.lives += 1
        self.table.clear()
        self._lose_track()
        self.changed()

    def gap(self, first: int, last: int) -> None:
        """Batches are lost for good."""
        self.counters.gaps += 1
        if len(self.table):
            log.warning("batches %s to %s are lost: %s blocks are suspect", first, last, len(self.table))
        self.table.suspect()
        self._lose_track()
        self.changed()

    def _lose_track(self) -> None:
        """Note that the replay does not go on from the snapshot: it would have written again what a predecessor wrote
        after it, and now whatever of that is in the store would stay."""
        self.is_astray |= self._is_resumed
        self._is_resumed = False

    def delivered(self, chain: PrefixChain, held_blocks: int) -> None:
        """A request found so many blocks of its chain in the cache."""
        self.table.delivered(chain, held_blocks)
        self.changed()

    @property
    def has_changes(self) -> bool:
        """Whether something changed that was not taken yet."""
        return any(self.table.tree.changes) or self.table.ends.have_changes

    def has_told(self, chain: PrefixChain) -> bool:
        """Say whether the engine has told of all blocks of a chain, and holds them still."""
        return self.table.held(chain) == blocks_in(chain)

    @property
    def doubt(self) -> float | None:
        """The share of the blocks held that is suspect; None where no event of this life was lost."""
        if not self.table.can_learn:
            return None
        return min(1.0, self.table.suspects / max(1, len(self.table)))

    def rebuild(self) -> None:
        """Doubt the table: what the engine delivered was not what it said. Begin anew with what the engine still tells;
        where it tells nothing again, everything is suspect."""
        if self._stream is None:
            return
        self.is_astray = True  # who goes on from a snapshot would not hear of it
        if self._stream.replay_endpoint is None:
            self.table.suspect()
        else:
            self.table.clear()
            self._stream.rewind(None)
        self.changed()

    def describe(self) -> dict[str, Any]:
        """Return counts for an operator."""
        table = self.table
        reached = {tier: len(cells) for tier, cells in zip(TIERS, table.tree.cells, strict=True) if cells}
        return {
            "blocks": reached,
            "hit_ends": len(table.ends.cells) if table.ends.are_needed else None,  # None: anywhere
            "remembered": len(table),
            "suspects": table.suspects,
            **msgspec.structs.asdict(self.counters),
            "of_blocks": msgspec.structs.asdict(table.counters),
        }

    def take(self) -> list[Changes]:
        """Return what changed since the last time."""
        return self.table.changes()


def _nobody() -> None:
    """Nobody waits for changes."""
