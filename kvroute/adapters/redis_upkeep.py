"""What a router does for the shared index in the background, one round after another in a single task.

Heartbeat (0.5 s): alive, serves these replicas, gets its share of the leases. Feed: after a new epoch, or when writes
were lost, what this router placed is sent again in bounded steps. Replay: the logs of owned replicas become evictions.
Snapshot (30 s, or when the log has grown): a successor starts from it. Sweep: dead slots' bits go, some buckets a
round.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import secrets
from collections.abc import Callable, Sequence

from kvroute.adapters.index import IndexStats, MemoryIndex
from kvroute.adapters.redis_events import Events, doubt_in
from kvroute.adapters.redis_link import Link, ask
from kvroute.adapters.redis_owner import START, LogId, Owner, Write, part_of, sent
from kvroute.adapters.redis_shard import Member, Shard, calls
from kvroute.adapters.redis_wire import Argument, Reply
from kvroute.errors import IndexUnavailable
from kvroute.kv.chain import blocks_in
from kvroute.kv.residency import Residency
from kvroute.routing.replica import ReplicaId

log = logging.getLogger(__name__)

BEAT_S, ALIVE_S = 0.5, 1.6  # a dead owner's streams and logs have another after 2.1 s at most
BEHIND_ROUND_S = 0.025  # between two rounds while there is more to read, to send again or to sweep
BUSY_ROUND_S = 0.1  # while requests come: evictions lag by so much, and each round costs every router a wake-up
IDLE_ROUND_S = 0.5
RETRY_S = 1.0  # before a feed that failed is tried again
FEED_BLOCKS = 4096  # sent again in one round
DRAIN_RECORDS = 64  # of one replica, read in one round
SNAPSHOT_S, SNAPSHOT_BYTES = 30.0, 1 << 20
SWEEP_BUCKETS = 256
RETIRED_MAX = 1024
SAME_RESTART_S = 10.0  # within this, a replica that left here and was begun anew elsewhere is one restart

_REFUSALS = (b"E", b"T", b"F", b"L")  # see write.lua


class Upkeep:
    """The background work of one RedisIndex."""

    def __init__(
        self,
        link: Link,
        router_id: str,
        shards: Callable[[], list[Shard]],
        shadow: MemoryIndex,
        stats: IndexStats,
        is_alone: Callable[[], bool],
    ) -> None:
        self.is_busy = False  # something was sent: the next round comes soon
        self._is_behind = False
        self._link = link
        self._router_id = router_id
        self._shards = shards
        self._shadow = shadow
        self._stats = stats
        self._is_alone = is_alone
        self._woken = asyncio.Event()
        self.events = Events(link, self.judge)
        self._retired: dict[tuple[bytes, ReplicaId, bytes], bytes] = {}  # (prefix, replica, token) -> epoch

    def wake(self) -> None:
        """Begin the next round now."""
        self._woken.set()

    def retire(self, shard: Shard, member: Member) -> None:
        """End the life of a replica in Redis, as soon as it can be reached.

        Every router sees a restart, some later than others: the life that the first of them began is not ended again.
        """
        if asyncio.get_running_loop().time() < member.adopted_s + SAME_RESTART_S:
            return
        if member.token is not None and len(self._retired) < RETIRED_MAX:
            self._retired[shard.prefix, member.replica, member.token] = shard.epoch
            self.wake()

    def judge(self, shard: Shard, member: Member, reply: Reply) -> bool:
        """Take in the reply to a write; True where it was executed."""
        if isinstance(reply, Exception):
            self._stats.errors += 1
            shard.mark_stale(member)
        elif reply not in _REFUSALS:
            return True
        elif reply == b"L":
            self._stats.writes_dropped += 1
        elif reply == b"E":
            shard.is_ready = False
        else:
            shard.next_beat_s = 0.0
        self.wake()
        return False

    async def run(self) -> None:
        """Do rounds for ever."""
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause_s()):
                    await self._woken.wait()
            if self._woken.is_set():
                self._woken.clear()
                await asyncio.sleep(
                    BEHIND_ROUND_S / 10
                )  # whoever wakes us in a loop does not get a loop without a pause
            await self.once()

    def _pause_s(self) -> float:
        pause_s = BEHIND_ROUND_S if self._is_behind else BUSY_ROUND_S if self.is_busy else IDLE_ROUND_S
        if not self._link.is_up:
            return pause_s
        next_beat_s = min((shard.next_beat_s for shard in self._shards()), default=math.inf)
        return max(BEHIND_ROUND_S, min(pause_s, next_beat_s - asyncio.get_running_loop().time()))

    async def once(self) -> None:
        """Do one round, as far as Redis allows."""
        self.is_busy = self._is_behind = False
        await self.events.bury()
        if not self._link.is_up:
            return
        try:
            await self._retire_all()
            for shard in self._shards():
                await self._look_after(shard)
        except IndexUnavailable as error:
            self._stats.errors += 1
            log.debug("upkeep interrupted: %s", error)
        except Exception:  # a feed loop goes on: the next round starts from what Redis says
            self._stats.errors += 1
            log.exception("upkeep of the index failed")
        self._stats.owned_replicas = sum(m.lease is not None for s in self._shards() for m in s.members.values())

    async def sign_off(self) -> None:
        """Stop listening to events, and hand the leases back, if Redis can be told quickly."""
        await self.events.bury()
        for shard in self._shards():
            for member in shard.members.values():
                await self.events.let_go(member)
        with contextlib.suppress(IndexUnavailable):
            await self._retire_all()
            for shard in self._shards():
                await ask(self._link, "beat", shard.prefix, (self._router_id, 0, ""), timeout_s=0.2)

    async def _retire_all(self) -> None:
        for key, epoch in list(self._retired.items()):
            prefix, replica, token = key
            await ask(self._link, "leave", prefix, (epoch, replica, token))
            del self._retired[key]
            for shard in self._shards():
                if shard.prefix == prefix:
                    shard.is_sweeping = True

    async def _look_after(self, shard: Shard) -> None:
        loop = asyncio.get_running_loop()
        if not shard.is_ready or loop.time() >= shard.next_beat_s:
            await self._beat(shard)
            shard.next_beat_s = loop.time() + BEAT_S
        for member in list(shard.members.values()):
            await self.events.tend(shard, member, loop.time())
            await self._feed(shard, member, loop.time())
        shard.is_feeding = any(member.is_stale or member.feed for member in shard.members.values())
        await self._replay(shard)
        for member in list(shard.members.values()):
            await self._save(shard, member, loop.time())
        if shard.is_sweeping:
            shard.is_sweeping = bool(await ask(self._link, "sweep", shard.prefix, (shard.epoch, SWEEP_BUCKETS)))
            self._is_behind |= shard.is_sweeping

    async def _beat(self, shard: Shard) -> None:
        members = dict(shard.members)
        word = secrets.token_hex(8)
        arguments: tuple[Argument, ...] = (self._router_id, int(ALIVE_S * 1000), word, *members)
        epoch, version, registry, leases, fed = await ask(self._link, "beat", shard.prefix, arguments)
        shard.is_own = self._is_alone() and (epoch == word.encode() or (shard.is_own and epoch == shard.epoch))
        if epoch != shard.epoch:
            shard.epoch = epoch
            for member in members.values():
                member.forget()
        if version != shard.version:
            shard.is_sweeping = True
        shard.fed = {int(fed[i]): fed[i + 1] for i in range(0, len(fed), 2)}
        shard.doubts = {slot: doubt for slot, state in shard.fed.items() if (doubt := doubt_in(state))}
        shard.read_registry(version, registry)
        owned = {ReplicaId(leases[i].decode()): leases[i + 1] for i in range(0, len(leases), 2)}
        for replica, member in members.items():
            if shard.members.get(replica) is member:  # it may have left while Redis was asked
                self._register(shard, member, shard.tokens.get(replica), owned.get(replica))
        shard.name_slots()
        shard.is_feeding = any(member.is_stale for member in shard.members.values())
        shard.is_ready = True

    def _register(self, shard: Shard, member: Member, token: bytes | None, lease: bytes | None) -> None:
        if token is None:
            log.warning("no slot is free for %s in %s: it is not indexed", member.replica, shard.namespace)
        elif member.token is None:
            residency = self._shadow.residency(member.replica)
            member.is_stale = bool(residency)  # what was placed before belongs to this life, and is not in Redis
        elif member.token != token:
            # Another router began a new life: the replica restarted, and what we placed before is gone.
            self._shadow.leave(member.replica)
            self._shadow.join(member.replica, shard.namespace, member.capacity_blocks)
            member.forget()
            member.adopted_s = asyncio.get_running_loop().time()
        member.token = token
        if member.lease != lease:
            member.lease, member.owner = lease, None

    async def _feed(self, shard: Shard, member: Member, now_s: float) -> None:
        """Send again, a part at a time, what this router placed on a replica."""
        if shard.is_fed(member):
            member.is_stale, member.feed = False, None  # its events say what it holds
        if member.token is None or now_s < member.feed_after_s:
            return
        if member.is_stale and member.feed is None:
            member.is_stale = False
            residency = self._shadow.residency(member.replica)
            if residency:
                member.feed = Residency.unpack(residency.pack()).chains()
        blocks = 0
        while member.feed is not None and blocks < FEED_BLOCKS:
            chain, known = next(member.feed, (None, 0))
            if chain is None:
                member.feed = None
                break
            blocks += blocks_in(chain) - known
            is_written = False
            try:
                writes = [Write(b"+", part_of(chain, known))]
                is_written = await self._write(shard, member, b"", sent(chain, known), writes)
            finally:
                if not is_written:
                    member.feed, member.is_stale, member.feed_after_s = None, True, now_s + RETRY_S
        self._is_behind |= blocks > 0

    async def _replay(self, shard: Shard) -> None:
        """Read the logs of the replicas that this router owns, and clear what they must have evicted."""
        owned = [member for member in shard.members.values() if member.lease is not None and member.token is not None]
        for member in owned:
            if member.owner is None and not shard.is_fed(member):
                snapshot, end = await ask(self._link, "load", shard.prefix, (member.slot,))
                member.owner = _owner(member, snapshot, end)
        owned = [member for member in owned if _read_to(shard, member) is not None]
        if not owned:
            return
        where = [part for m in owned for part in (m.slot, "{}-{}".format(*(_read_to(shard, m) or START)))]
        logs = await ask(self._link, "drain", shard.prefix, (shard.epoch, DRAIN_RECORDS, *where))
        if logs == b"E":
            shard.is_ready = False
            return
        for member, entries in zip(owned, logs, strict=True):
            if entries:
                self.is_busy = True
                self._is_behind |= len(entries) == DRAIN_RECORDS
                records = [(id, fields[1]) for id, fields in entries]
                if shard.is_fed(member):
                    self.events.hear(member, records)
                else:
                    await self._catch_up(shard, member, records)

    async def _catch_up(self, shard: Shard, member: Member, entries: Sequence[tuple[bytes, bytes]]) -> None:
        owner, lease = member.owner, member.lease
        if owner is None or lease is None or shard.members.get(member.replica) is not member:
            return
        before = owner.evictions
        writes = owner.replay(entries)
        self._stats.evictions += owner.evictions - before
        # Until every write is executed this state must not be built on: whatever happens, it is loaded again.
        member.owner = None
        if not writes or await self._write(shard, member, lease, b"", writes):
            member.owner = owner

    async def _write(self, shard: Shard, member: Member, lease: bytes, record: bytes, writes: Sequence[Write]) -> bool:
        batches = calls(writes)
        for number, batch in enumerate(batches):
            if member.token is None:
                return False
            entry = record if number == len(batches) - 1 else b""
            reply = await ask(self._link, "write", shard.prefix, shard.write(member, lease, entry, batch))
            if not self.judge(shard, member, reply):
                return False
        return True

    async def _save(self, shard: Shard, member: Member, now_s: float) -> None:
        owner = None if shard.is_fed(member) else member.owner
        if owner is None or member.token is None or member.lease is None or owner.last_id == START:
            return
        is_due = owner.bytes_since_snapshot and now_s >= owner.snapshot_at_s + SNAPSHOT_S
        if is_due or owner.bytes_since_snapshot > max(SNAPSHOT_BYTES, 16 * member.capacity_blocks):
            last_id, packed = owner.snapshot()
            owner.bytes_since_snapshot, owner.snapshot_at_s = 0, now_s
            arguments = (shard.epoch, member.replica, member.token, member.lease, last_id, packed)
            self.judge(shard, member, await ask(self._link, "save", shard.prefix, arguments))


def _read_to(shard: Shard, member: Member) -> LogId | None:
    """Return the last record of a member's log that was taken in; None where nobody is there to take it in."""
    if shard.is_fed(member):
        return member.writer.heard if member.writer and member.writer.feed.is_owner else None
    return member.owner.last_id if member.owner else None


def _owner(member: Member, snapshot: bytes | None, log_end: bytes) -> Owner:
    try:
        return Owner(member.capacity_blocks, snapshot, log_end)
    except ValueError as error:  # written by another version of kvroute: the log alone has to do
        log.warning("the snapshot of %s cannot be read: %s", member.replica, error)
        return Owner(member.capacity_blocks, None, log_end)
