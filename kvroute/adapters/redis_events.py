"""What the owner of an event stream does in Redis: writes what changed, begins new lives, stores snapshots, takes over.

Changes of a replica go out in calls of bounded size, one at a time, each fenced by the lease; the last one of a batch
carries the stream's position. While a call is under way changes gather in the table, where what is stored and removed
again costs nothing. A call is repeated until it is answered; it sets and clears bits, so that does no harm.

In doubt (another epoch, another life, no snapshot) the slot is given up for a new one and the whole table is written.
A snapshot is taken together with changes and stored once they are in Redis, so that a successor who replays what came
after it arrives where the stream is, whatever the dead owner had written beyond.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence

from msgspec import Struct

from kvroute.adapters.event_feed import OPEN_AGAIN_S, EventFeed
from kvroute.adapters.redis_link import Link, ask
from kvroute.adapters.redis_owner import START, LogId, log_id, read_delivery, records_in
from kvroute.adapters.redis_shard import Member, Shard
from kvroute.adapters.redis_wire import Argument, Reply
from kvroute.kv.cells import CELL_BYTES, Changes
from kvroute.kv.event_sequence import Position

log = logging.getLogger(__name__)

CALL_BLOCKS = 256  # written by one call, so that lookups do not wait for longer than about half a millisecond
SNAPSHOT_S = 30.0
NOTHING_YET = b"-"  # state of a replica whose events are heard, before anything was written


class _Call(Struct, frozen=True):
    arguments: tuple[Argument, ...]
    state: bytes  # of the stream when this is written; empty = more follows


class EventWriter:
    """The calls of one owned stream, in order."""

    def __init__(self, feed: EventFeed) -> None:
        self.feed = feed
        self.token: bytes | None = None  # the life of which Redis has all but what waits here and in the table
        self.heard: LogId = START  # last record of deliveries that was taken in
        self.is_scheduled = False
        self.is_under_way = False
        self.waiting: deque[_Call] = deque()
        self.snapshot: bytes | None = None  # holds what was waiting when it was taken
        self.is_written = False  # everything in the snapshot is in Redis; what came after it may be, too
        self.snapshot_due_s = 0.0
        self.wants_snapshot = False
        self.retry_after_s = 0.0  # a stream that could not be opened
        self.told_doubt: float | None = None  # as Redis has it

    @property
    def is_caught_up(self) -> bool:
        """Whether Redis has all that the engine has told."""
        is_idle = self.token is not None and not self.is_under_way and not self.waiting
        return is_idle and self.feed.is_exact and not self.feed.has_changes

    def fill(self, changes: Sequence[Changes]) -> None:
        """Cut changes into calls."""
        state = state_of(self.feed)
        calls = calls_of(changes, state)
        if not calls and doubt_in(state) != self.told_doubt:
            calls = [_Call((), state)]
        if calls:
            self.told_doubt = doubt_in(state)
        self.waiting.extend(calls)

    def take_snapshot(self) -> None:
        """Pack the table as it will be in Redis when what waits now was written."""
        self.wants_snapshot = False
        self.snapshot = pack_snapshot(self.feed.position, self.heard, self.feed.table.pack())
        self.is_written = not self.waiting

    def forget(self) -> None:
        """Nothing is known of what Redis has."""
        self.token, self.snapshot = None, None
        self.waiting.clear()


class Events:
    """The streams that this router owns in one index."""

    def __init__(self, link: Link, judge: Callable[[Shard, Member, Reply], bool]) -> None:
        self._link = link
        self._judge = judge
        self._orphans: list[Member] = []

    def orphan(self, member: Member) -> None:
        """Let go of a replica's stream, in the next round."""
        if member.writer is not None:
            member.writer.feed.changed = _nothing
            self._orphans.append(member)

    async def bury(self) -> None:
        """Let go of the streams of replicas that have left."""
        while self._orphans:
            await self.let_go(self._orphans.pop())

    async def tend(self, shard: Shard, member: Member, now_s: float) -> None:
        """Bring a followed replica in line with who owns it, with the life it is in, and with whether it speaks."""
        writer = member.writer
        if writer is None or member.token is None:
            return
        feed = writer.feed
        if member.lease is None:
            if feed.is_owner:
                await self.let_go(member)
            return
        if not feed.is_owner and now_s >= writer.retry_after_s:
            await self._take_over(shard, member, writer, now_s)
        if not feed.is_owner:
            return
        if feed.is_silent and shard.is_fed(member):
            await self._renew(shard, member, b"")
        elif feed.is_exact and feed.is_settled and (writer.token != member.token or feed.is_astray):
            feed.is_astray = False  # should this fail, there is no token
            await self._renew(shard, member, state_of(feed))
            if writer.token is not None:
                writer.fill(feed.table.everything())
        writer.wants_snapshot = now_s >= writer.snapshot_due_s and writer.snapshot is None
        await self._keep(shard, member)
        self.send(shard, member)

    async def let_go(self, member: Member) -> None:
        """Leave the stream to others."""
        writer = member.writer
        if writer is not None:
            writer.feed.changed = _nothing
            await writer.feed.release()
            writer.forget()

    def hear(self, member: Member, entries: Sequence[tuple[bytes, bytes]]) -> None:
        """Take in what other routers' requests found in the cache."""
        writer = member.writer
        if writer is None:
            return
        for text, entry in entries:
            writer.heard = log_id(text)
            for delivery in filter(None, map(read_delivery, records_in(entry))):
                if writer.feed.is_owner:
                    writer.feed.delivered(*delivery)

    def send(self, shard: Shard, member: Member) -> None:
        """Write what waits, unless a call is under way; its answer brings the next."""
        writer = member.writer
        if writer is None or writer.is_under_way or writer.token is None or writer.token != member.token:
            return
        if not shard.is_ready or member.lease is None or not writer.feed.is_owner or writer.feed.is_astray:
            return
        if not writer.waiting:
            writer.is_written = writer.snapshot is not None
            writer.fill(writer.feed.take())
            if writer.wants_snapshot and writer.snapshot is None:
                writer.take_snapshot()
        if not writer.waiting:
            return
        call = writer.waiting[0]
        assert member.token is not None
        head = (shard.epoch, member.replica, member.token, member.lease, call.state)

        def done(reply: Reply) -> None:
            writer.is_under_way = False
            if not self._judge(shard, member, reply):
                return
            if writer.waiting and writer.waiting[0] is call:
                writer.waiting.popleft()
            self.send(shard, member)
            settle_soon(member)

        writer.is_under_way = self._link.run("changes", shard.prefix, (*head, *call.arguments), done)

    async def _take_over(self, shard: Shard, member: Member, writer: EventWriter, now_s: float) -> None:
        """Begin to listen: where the last owner's snapshot ends, if there is one of this life."""
        state, snapshot, end = await ask(self._link, "resume", shard.prefix, (member.slot,))
        writer.forget()
        writer.heard = log_id(end)
        writer.snapshot_due_s = now_s + SNAPSHOT_S
        feed = writer.feed
        if state and snapshot:
            try:
                position, heard, packed = unpack_snapshot(snapshot)
                await feed.own(packed, position)
                writer.heard, writer.token = heard, member.token
            except ValueError as error:
                log.warning("the snapshot of %s cannot be read: %s", member.replica, error)
            except OSError:  # tried once more below, and told there
                writer.token = None
        try:
            if not feed.is_owner:
                await feed.own()
        except OSError as error:
            log.warning("%s: %s", member.replica, error)
            writer.retry_after_s = now_s + OPEN_AGAIN_S
            return
        loop = asyncio.get_running_loop()

        def changed() -> None:
            if not writer.is_scheduled:
                writer.is_scheduled = True
                loop.call_soon(flush)

        def flush() -> None:
            writer.is_scheduled = False
            self.send(shard, member)

        feed.changed = changed

    async def _renew(self, shard: Shard, member: Member, state: bytes) -> None:
        """Begin a new life in Redis, empty."""
        writer = member.writer
        assert writer is not None
        assert member.token is not None
        assert member.lease is not None
        writer.forget()
        arguments = (shard.epoch, member.replica, member.token, member.lease, state)
        reply = await ask(self._link, "renew", shard.prefix, arguments)
        if reply == b"N":
            log.warning("no slot is free for %s in %s: it is not indexed", member.replica, shard.namespace)
            return
        if not self._judge(shard, member, reply):
            return
        if member.token != arguments[2] or shard.members.get(member.replica) is not member:
            return
        shard.begin_life(member, bytes(reply), is_fed=bool(state))
        member.adopted_s = asyncio.get_running_loop().time()
        if state:
            writer.token = member.token
        else:
            shard.mark_stale(member)

    async def _keep(self, shard: Shard, member: Member) -> None:
        """Store the snapshot, once everything in it is in Redis."""
        writer = member.writer
        if writer is None or writer.snapshot is None or not writer.is_written:
            return
        assert member.token is not None
        assert member.lease is not None
        snapshot, writer.snapshot = writer.snapshot, None
        heard = snapshot.split(b" ", 2)[1]
        arguments = (shard.epoch, member.replica, member.token, member.lease, heard, snapshot)
        self._judge(shard, member, await ask(self._link, "keep", shard.prefix, arguments))
        writer.snapshot_due_s = asyncio.get_running_loop().time() + SNAPSHOT_S


def settle_soon(member: Member) -> None:
    """End the promises of what the engine has told of, if Redis has it: after lookups that Redis has answered without,
    and whose answers came together with that of the last write."""
    writer, promised = member.writer, member.promised
    if writer is not None and promised is not None and writer.is_caught_up:
        asyncio.get_running_loop().call_soon(promised.settle, writer.feed.has_told)


def calls_of(changes: Sequence[Changes], state: bytes) -> list[_Call]:
    """Gather changes, in order, into as few calls as may be; the last one carries the state."""
    size = CALL_BLOCKS * CELL_BYTES
    gathered: list[tuple[Argument, ...]] = []
    room = 0
    for change in changes:
        cuts = [(change.gone[at : at + size], b"") for at in range(0, len(change.gone), size)]
        cuts += [(b"", change.added[at : at + size]) for at in range(0, len(change.added), size)]
        if len(change.gone) + len(change.added) <= size:
            cuts = [(change.gone, change.added)]
        for gone, added in cuts:
            length = len(gone) + len(added)
            if length > room or not gathered:
                gathered.append(())
                room = size
            gathered[-1] += (change.tier, gone, added)
            room -= length
    last = len(gathered) - 1
    return [_Call(arguments, state if number == last else b"") for number, arguments in enumerate(gathered)]


def state_of(feed: EventFeed) -> bytes:
    """Say how far a stream was read, and what share of the blocks is suspect, in hundredths, if any may be."""
    position, doubt = feed.position, feed.doubt
    if position is None:
        return NOTHING_YET
    where = b"%d.%x." % (position.seq, position.digest)
    return where if doubt is None else b"%b%d" % (where, round(100 * doubt))


def doubt_in(state: bytes) -> float | None:
    """Read the share of a replica's blocks that is suspect; None where deliveries are of no use to the owner."""
    hundredths = state.rpartition(b".")[2]
    return int(hundredths) / 100 if hundredths.isdigit() else None


def pack_snapshot(position: Position | None, heard: LogId, packed: bytes) -> bytes:
    """Put a table, the position that it was read up to, and the last delivery in it, together."""
    where = b"-" if position is None else b"%d.%x" % (position.seq, position.digest)
    return b"%b %d-%d %b" % (where, *heard, packed)


def unpack_snapshot(data: bytes) -> tuple[Position | None, LogId, bytes]:
    """Take a snapshot apart.

    Raises:
        ValueError: the bytes are not a snapshot.
    """
    where, heard, packed = data.split(b" ", 2)
    seq, _, digest = where.partition(b".")
    return None if where == b"-" else Position(int(seq), int(digest, 16)), log_id(heard), packed


def _nothing() -> None:
    """Nobody writes changes."""
