"""The index in Redis, shared by all routers; when it fails, this router's own placements answer: the shadow.

`match` is one script call per chain and shard, all in one write and one round trip, with a deadline. `record` and
`correct` go out with the next write and are not waited for. Everything slow, heartbeats, replaying logs, feeding again,
sweeping, is done by `redis_upkeep` in one background task.

A router that is alone, and has been since the index began, knows all that the index does: its shadow answers at once,
and what it writes, for routers still to come, leaves a little later and in larger pieces.

Keys, all of one shard under one hash tag `{kvr:v1:<deployment>:<namespace>:<s>}`: buckets `b..` of blocks (write.lua),
registry, leases and epoch (beat.lua), one log and snapshot per slot. docs/decisions/002 says why blocks lie in buckets,
003 how several routers feed it without events.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial

from kvroute.adapters.event_feed import EventFeed
from kvroute.adapters.index import IndexStats, Match, MemoryIndex, Namespace
from kvroute.adapters.redis_events import EventWriter, doubt_in, settle_soon
from kvroute.adapters.redis_link import Link
from kvroute.adapters.redis_lookup import Deadlines, Lookup
from kvroute.adapters.redis_owner import Write, corrected, delivered, part_of, sent, together
from kvroute.adapters.redis_shard import UNSENT_PIECES_ALONE, Member, Shard, Unsent, calls, shard_number
from kvroute.adapters.redis_upkeep import Upkeep
from kvroute.adapters.redis_wire import Reply
from kvroute.kv.block_tree import TIERS
from kvroute.kv.chain import PrefixChain, blocks_in
from kvroute.kv.promised import Promised
from kvroute.routing.replica import Holding, ReplicaId

log = logging.getLogger(__name__)

DEADLINE_S = 0.005
GATHER_S = 0.002  # for which a write waits for others: another router sees it that much later
GATHER_ALONE_S = 0.05  # the same where there is no other
PROBES_MAX = 96  # a coarse pass over any chain takes at most about 80 of them, exact depths the rest


class RedisIndex:
    """The shared index. Routers of one deployment have the same `deployment` and `shards`; `router_id` is their own.

    `is_alone` says whether there is no other router now; it may be late by a second.
    """

    def __init__(
        self,
        link: Link,
        *,
        deployment: str,
        router_id: str,
        deadline_s: float = DEADLINE_S,
        shards: int = 1,
        is_alone: Callable[[], bool] = lambda: False,
    ) -> None:
        self.shadow = MemoryIndex()
        self.stats = IndexStats()
        self.probes = 0  # of the last lookup
        self._link = link
        self._deployment = deployment
        self._deadline_s = deadline_s
        self._shard_count = shards
        self._shards: dict[Namespace, list[Shard]] = {}
        self._used: dict[Namespace, list[Shard]] = {}  # of these, the ones in which we serve a replica
        self._homes: dict[ReplicaId, Shard] = {}
        self._deadlines = Deadlines()
        self._is_alone = is_alone
        self._upkeep = Upkeep(link, router_id, self._all_shards, self.shadow, self.stats, is_alone)
        self._task: asyncio.Task[None] | None = None
        self._unsent: dict[ReplicaId, Shard] = {}  # where writes wait for others to go with them
        self._flushing: asyncio.TimerHandle | None = None

    @property
    def is_feeding(self) -> bool:
        """Whether Redis still lacks something that this router placed."""
        return any(shard.is_feeding or not shard.is_ready for shard in self._all_shards())

    async def start(self) -> None:
        """Begin the upkeep. The link is its owner's to start and close."""
        self._link.on_up.append(self._on_up)
        await self._upkeep.once()
        self._task = asyncio.get_running_loop().create_task(self._upkeep.run(), name="kvroute-index-upkeep")

    async def close(self) -> None:
        """Stop the upkeep and hand the leases to the other routers."""
        with contextlib.suppress(ValueError):
            self._link.on_up.remove(self._on_up)
        if self._flushing is not None:
            self._flushing.cancel()
            self._flush_all()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            await self._upkeep.sign_off()
        self._deadlines.close()

    def join(self, replica: ReplicaId, namespace: Namespace, capacity_blocks: int) -> None:
        """Admit a replica, or take it on from where other routers are. Other values than before begin a new life."""
        shard = self._homes.get(replica)
        if shard and shard.namespace == namespace and shard.members[replica].capacity_blocks == capacity_blocks:
            return
        self.leave(replica)
        self.shadow.join(replica, namespace, capacity_blocks)
        if namespace not in self._shards:
            self._shards[namespace] = [Shard(self._deployment, namespace, n) for n in range(self._shard_count)]
        shard = self._shards[namespace][shard_number(replica, self._shard_count)]
        shard.members[replica] = Member(replica, capacity_blocks)
        shard.next_beat_s = 0.0
        self._homes[replica] = shard
        self._count_shards(namespace)
        self._upkeep.wake()

    def leave(self, replica: ReplicaId) -> None:
        """Forget a replica and all that it held, in every router."""
        shard = self._homes.pop(replica, None)
        if shard is None:
            return
        self.shadow.leave(replica)
        member = shard.members.pop(replica)
        self._upkeep.events.orphan(member)
        self._unsent.pop(replica, None)
        shard.name_slots()
        self._upkeep.retire(shard, member)
        self._count_shards(shard.namespace)

    def follow(self, replica: ReplicaId, feed: EventFeed) -> None:
        """Have a member's own events say what it holds; the router that has its lease listens to them."""
        if shard := self._homes.get(replica):
            member = shard.members[replica]
            self._upkeep.events.orphan(member)
            member.writer = EventWriter(feed)
            member.promised = Promised(feed.capacity_blocks)
            shard.is_followed = True
            self._upkeep.wake()

    def delivered(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note what a request found in the cache; the owner of the replica's events is told, if there is one."""
        shard = self._homes.get(replica)
        if shard is None:
            return
        member = shard.members[replica]
        if member.promised is not None:
            member.promised.keep(chain, time.monotonic())
            settle_soon(member)
        if not shard.is_ready or not shard.is_fed(member):
            return
        if member.writer is not None and member.writer.feed.is_owner:
            member.writer.feed.delivered(chain, held_blocks)
        elif doubt_in(shard.fed[int(member.slot)]) is not None:
            self._send(replica, [], delivered(chain, held_blocks), None)

    def is_exact(self, replica: ReplicaId) -> bool:
        """Whether a member's own events say what it holds, whichever router listens to them."""
        shard = self._homes.get(replica)
        return shard is not None and shard.is_fed(shard.members[replica])

    async def match(self, namespace: Namespace, chains: Sequence[PrefixChain]) -> Match:
        """Return the holdings of every chain: of the shared index, or of the shadow when that is late or down."""
        self.stats.lookups += 1
        shards = self._used.get(namespace)
        if not shards:
            return Match(({},) * len(chains), "index")
        if self._knows_all(shards):
            self.stats.own_answers += 1
            return Match(tuple([self.shadow.holding(namespace, chain) for chain in chains]), "index")
        lookup = self._ask(shards, chains)
        if lookup is not None and (holdings := self._read(namespace, shards, chains, lookup, await lookup.done)):
            return _match(holdings, shards)
        self.stats.local_answers += 1
        return Match(tuple([self.shadow.holding(namespace, chain) for chain in chains]), "local")

    def record(self, replica: ReplicaId, chain: PrefixChain, reusable_blocks: int | None = None) -> None:
        """Note that the replica holds all blocks of the chain from now on."""
        change = self.shadow.apply(replica, chain)
        if change is None:
            return
        self.stats.records += 1
        self.stats.blocks = self.shadow.stats.blocks
        if self._is_promise(replica, chain, end_blocks=reusable_blocks):
            return
        writes = [] if change.stored is None else [Write(b"+", change.stored)]
        self._send(replica, writes, sent(chain, change.held), chain)

    def answered(self, replica: ReplicaId, chain: PrefixChain) -> None:
        """Note that the replica has generated the last blocks of the chain."""
        self.record(replica, chain, 0)
        member = shard.members[replica] if (shard := self._homes.get(replica)) else None
        if member is not None and member.promised is not None:
            member.promised.keep(chain, time.monotonic())
            settle_soon(member)

    def correct(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note that the replica turned out to hold only the first `held_blocks` blocks of the chain."""
        if self.shadow.apply(replica, chain, held_blocks) is None or held_blocks >= blocks_in(chain):
            return
        self.stats.blocks = self.shadow.stats.blocks
        if self._is_promise(replica, chain, held_blocks):
            return
        self._send(replica, [Write(b"-", part_of(chain, held_blocks))], corrected(chain, held_blocks), None)

    def _knows_all(self, shards: Sequence[Shard]) -> bool:
        """Whether nothing can be in the index that this router has not written; while Redis answers."""
        if not self._is_alone():
            for shard in shards:
                shard.is_own = False  # and it stays so: what another router wrote outlives it
            return False
        return self._link.is_up and all(shard.is_in_shadow for shard in shards)

    def _ask(self, shards: Sequence[Shard], chains: Sequence[PrefixChain]) -> Lookup | None:
        """Look all chains up in Redis; None where that cannot even be asked."""
        now_s = time.monotonic()
        done = asyncio.get_running_loop().create_future()
        lookup = Lookup(len(shards) * len(chains), now_s + self._deadline_s, done)
        number = 0
        for chain in chains:
            for shard in shards:
                arguments = (shard.version, chain, PROBES_MAX)
                answer = partial(lookup.answer, number)
                if not shard.is_ready or not self._link.run("lookup", shard.prefix, arguments, answer):
                    return None
                number += 1
        self._deadlines.watch(lookup, now_s)
        return lookup

    def _read(
        self,
        namespace: Namespace,
        shards: Sequence[Shard],
        chains: Sequence[PrefixChain],
        lookup: Lookup,
        is_answered: bool,
    ) -> tuple[Holding, ...] | None:
        """Return the holdings of every chain; None where Redis did not answer in time, or something else."""
        if not is_answered:
            if lookup.is_late:
                self.stats.late += 1
                self._link.suspect()
            else:
                self.stats.errors += 1
            return None
        holdings: list[dict[ReplicaId, int]] = [{} for _ in chains]
        self.probes = 0
        for number, reply in enumerate(lookup.replies):
            try:
                probes = shards[number % len(shards)].read_lookup(reply, holdings[number // len(shards)])
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                self.stats.errors += 1
                log.debug("%s answered a lookup with what cannot be read: %r", self._link.describe, error)
                return None
            if probes is None:  # Redis is another one than the one that we fed
                self._upkeep.wake()
                return None
            self.probes += probes
        for shard in shards:
            if shard.is_feeding:
                self._add_own(namespace, chains, holdings)
                break
        else:
            if self._unsent:
                self._add_unsent(shards, chains, holdings)
        for shard in shards:
            if shard.is_followed:
                _add_promises(shard, chains, holdings)
        return tuple(holdings)

    def _add_own(
        self, namespace: Namespace, chains: Sequence[PrefixChain], holdings: list[dict[ReplicaId, int]]
    ) -> None:
        """Add what this router placed, which Redis does not have all yet; not where events say what is held."""
        for chain, holding in zip(chains, holdings, strict=True):
            for replica, blocks in self.shadow.holding(namespace, chain).items():
                shard = self._homes[replica]
                if blocks > holding.get(replica, 0) and not shard.is_told(shard.members[replica]):
                    holding[replica] = blocks

    def _is_promise(
        self, replica: ReplicaId, chain: PrefixChain, held_blocks: int | None = None, end_blocks: int | None = None
    ) -> bool:
        """Make a promise, or take it back; False where sending is what says that a replica holds something."""
        shard = self._homes[replica]
        member = shard.members[replica]
        if member.promised is not None and held_blocks is None:
            member.promised.record(chain, time.monotonic(), end_blocks)
        elif member.promised is not None and held_blocks is not None:
            member.promised.take_back(chain, held_blocks)
        return shard.is_fed(member)

    def _add_unsent(
        self, shards: Sequence[Shard], chains: Sequence[PrefixChain], holdings: list[dict[ReplicaId, int]]
    ) -> None:
        """Add what this router placed a moment ago, and has not sent to Redis yet."""
        for replica, shard in self._unsent.items():
            if shard not in shards:
                continue
            member = shard.members[replica]
            for chain, holding in zip(chains, holdings, strict=True):
                blocks = min(member.unsent.common_blocks(chain), member.capacity_blocks)
                if blocks > holding.get(replica, 0):
                    holding[replica] = blocks

    def _send(self, replica: ReplicaId, writes: Sequence[Write], record: bytes, chain: PrefixChain | None) -> None:
        """Write a replica's bits, and with the last of them its log entry, together with what comes within a moment.

        A correction (no `chain`) takes back what waits before it, so it leaves at once.
        """
        shard = self._homes[replica]
        member = shard.members[replica]
        if not shard.is_ready or member.token is None:
            shard.mark_stale(member)
            return
        unsent = member.unsent
        if not unsent.records:
            self._unsent[replica] = shard
        unsent.add(writes, record, chain)
        if chain is None or unsent.is_full(UNSENT_PIECES_ALONE if shard.is_own else 1):
            self._flush(replica)
        elif self._flushing is None:
            gather_s = GATHER_ALONE_S if shard.is_own else GATHER_S
            self._flushing = asyncio.get_running_loop().call_later(gather_s, self._flush_all)
        self._upkeep.is_busy = True

    def _flush_all(self) -> None:
        self._flushing = None
        for replica in list(self._unsent):
            self._flush(replica)

    def _flush(self, replica: ReplicaId) -> None:
        shard = self._unsent.pop(replica)
        member = shard.members[replica]
        unsent, member.unsent = member.unsent, Unsent()
        if not unsent.records:  # the replica began another life, or Redis did: what is still true is fed again
            return
        if not shard.is_ready or member.token is None:
            shard.mark_stale(member)
            return
        self._send_next(shard, member, calls(unsent.writes) or [[]], 0, together(unsent.records))

    def _send_next(self, shard: Shard, member: Member, batches: list[list[Write]], number: int, record: bytes) -> None:
        """Send one batch, and the next when it is answered: a long chain must not keep others' lookups waiting.

        Where there are no others, all are sent at once.
        """
        is_last = number == len(batches) - 1
        arguments = shard.write(member, b"", record if is_last else b"", batches[number])
        sent_as = member.token
        waits = not is_last and not shard.is_own

        def done(reply: Reply) -> None:
            if self._upkeep.judge(shard, member, reply) and waits and member.token == sent_as:
                self._send_next(shard, member, batches, number + 1, record)

        if not self._link.run("write", shard.prefix, arguments, done):
            self.stats.writes_dropped += 1
            shard.mark_stale(member)
        elif not is_last and not waits:
            self._send_next(shard, member, batches, number + 1, record)

    def _on_up(self) -> None:
        """The link came up: nothing is known of this Redis until it has answered a heartbeat."""
        self.stats.reconnects += 1
        for shard in self._all_shards():
            shard.is_ready = False
        self._upkeep.wake()

    def _count_shards(self, namespace: Namespace) -> None:
        self._used[namespace] = [shard for shard in self._shards[namespace] if shard.members]
        if not self._used[namespace]:
            del self._used[namespace], self._shards[namespace]

    def _all_shards(self) -> list[Shard]:
        return [shard for shards in self._used.values() for shard in shards]


def _add_promises(shard: Shard, chains: Sequence[PrefixChain], holdings: list[dict[ReplicaId, int]]) -> None:
    """Add what this router has just sent to replicas whose events have yet to say that they hold it."""
    now_s = time.monotonic()
    for member in shard.members.values():
        if member.promised is None:
            continue
        for chain, holding in zip(chains, holdings, strict=True):
            blocks = member.promised.held(chain, now_s, to_ends=member.replica in shard.hybrids)
            if blocks > holding.get(member.replica, 0):
                holding[member.replica] = blocks


def _match(holdings: tuple[Holding, ...], shards: Sequence[Shard]) -> Match:
    """Take the slower tiers, which were looked up under names of their own, out of holdings; say what is suspect."""
    doubts: dict[ReplicaId, float] = {}
    for shard in shards:
        for slot, doubt in shard.doubts.items():
            if doubtful := shard.replicas[slot]:
                doubts[doubtful] = doubt
    if not any(shard.has_tiers for shard in shards):
        return Match(holdings, "index", doubts=doubts)
    fastest, slower = [], []
    for holding in holdings:
        tiers: list[dict[ReplicaId, int]] = [{} for _ in TIERS]
        for name, blocks in holding.items():
            replica, _, tier = name.partition(" ")
            tiers[int(tier or 0)][ReplicaId(replica)] = blocks
        fastest.append(tiers[0])
        slower.append(tuple(tiers[1:]))
    return Match(tuple(fastest), "index", tuple(slower), doubts)
