"""The index: which replica holds which leading blocks.

`Index` is the contract; tests/contracts/test_index.py holds every implementation to it. `MemoryIndex` is the one for
simulations, tests, `--index memory`, and the local shadow that answers while Redis does not.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Coroutine, Mapping, Sequence
from typing import Literal, NewType, Protocol

from msgspec import Struct
from xxhash import xxh3_64_hexdigest

from kvroute.adapters.event_feed import OPEN_AGAIN_S, EventFeed
from kvroute.kv.block_tree import TIERS
from kvroute.kv.chain import HASH_VERSION, PrefixChain
from kvroute.kv.promised import Promised
from kvroute.kv.residency import Change, Residency
from kvroute.routing.replica import Holding, ReplicaId

Namespace = NewType("Namespace", str)  # model, block size, tokenizer fingerprint and hash version, see `namespace_of`


log = logging.getLogger(__name__)


def namespace_of(model: str, block_size: int, fingerprint: str) -> Namespace:
    """Name the index entries of one base model: whoever renders, tokenises or hashes differently gets another name.

    `fingerprint` says how prompts become tokens (tokenizer, template, mode). The name is safe within a Redis key.
    """
    fields = (model, str(block_size), fingerprint, str(HASH_VERSION))
    digest = xxh3_64_hexdigest(b"".join(b"%d:%b" % (len(field), field) for field in (f.encode() for f in fields)))
    return Namespace(f"{re.sub(r'[^A-Za-z0-9._-]+', '-', model)[-32:]}.{digest}")


class Match(Struct, frozen=True):
    """What the index knows about the chains of one request."""

    holdings: tuple[Holding, ...]  # one per chain, in order; leading blocks by replica. Exact for the deepest holders;
    # the rest may be given up to 1/64 of the chain too little, never too much
    source: Literal["index", "local"]  # "local": the shared index was late or down, the router's own shadow answered
    slower: tuple[tuple[Holding, ...], ...] = ()  # per chain, for each slower tier: leading blocks that it and faster
    # tiers hold together, of replicas with such a tier. Empty where there is none

    doubts: Mapping[ReplicaId, float] = {}  # share of a replica's blocks that may be gone, since events were lost

    def held(self, chain: int, replica: ReplicaId) -> int:
        """Return how many leading blocks of a chain, by its place, a replica holds on any tier."""
        tiers = (self.holdings[chain : chain + 1], *self.slower[chain : chain + 1])
        return max((holding.get(replica, 0) for tier in tiers for holding in tier), default=0)


class IndexStats(Struct):
    """What an index did since it was made. Plain counters; telemetry reads them."""

    lookups: int = 0  # calls of `match`
    own_answers: int = 0  # of these, answered from memory, since nobody else writes to the index
    local_answers: int = 0  # of these, answered from the router's own shadow, which may know less than the index
    late: int = 0  # of these, because the deadline passed
    errors: int = 0  # error replies of the shared store
    records: int = 0  # chains recorded
    evictions: int = 0  # blocks taken out because a replica's capacity was reached
    writes_dropped: int = 0  # records that could not be sent; their replica is fed again later
    reconnects: int = 0
    owned_replicas: int = 0  # replicas whose capacity this router looks after
    blocks: int = 0  # blocks that this router itself placed and believes to be held


class Index(Protocol):
    """Who holds what. Writes are queued and never fail the caller; `match` never raises and has a deadline."""

    @property
    def stats(self) -> IndexStats: ...

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def join(self, replica: ReplicaId, namespace: Namespace, capacity_blocks: int) -> None:
        """Admit a replica, empty, or change its capacity. Joining again with other values starts a new generation."""

    def leave(self, replica: ReplicaId) -> None:
        """Forget a replica and all that it held; late writes of its old life change nothing."""

    async def match(self, namespace: Namespace, chains: Sequence[PrefixChain]) -> Match:
        """Return the holdings of every chain, in one round trip."""

    def record(self, replica: ReplicaId, chain: PrefixChain, reusable_blocks: int | None = None) -> None:
        """Note that the replica computes, and from now on holds, all blocks of the chain.

        `reusable_blocks`: how many of them the same prompt would find again, if not all.
        """

    def answered(self, replica: ReplicaId, chain: PrefixChain) -> None:
        """Note that the replica has generated the last blocks of the chain. Where its events say what it holds, they
        are late by a moment, for which this counts."""

    def correct(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note that the replica turned out to hold only the first `held_blocks` blocks of the chain."""

    def follow(self, replica: ReplicaId, feed: EventFeed) -> None:
        """Have a member's own events say what it holds, from when they are first heard until it leaves.

        From then on `record` and `correct` only make and take back promises, which count until events can have come.
        """

    def delivered(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note that a request was answered, and found so many blocks of its chain in the cache.

        That ends its promise, and where events were lost it says what is true.
        """

    def is_exact(self, replica: ReplicaId) -> bool:
        """Whether a member's own events say what it holds."""


class MemoryIndex:
    """The index of one router alone: one Residency per replica, fed by what was sent to it.

    Runs instead of an entry per block: a match walks the few runs that a chain crosses on each replica, so it is exact
    for all of them, and recording a known conversation costs its new turn only.
    """

    def __init__(self) -> None:
        self.stats = IndexStats()
        self._members: dict[ReplicaId, tuple[Namespace, Residency]] = {}
        self._rooms: dict[Namespace, dict[ReplicaId, Residency]] = {}
        self._feeds: dict[ReplicaId, tuple[EventFeed, Promised]] = {}
        self._opening: dict[ReplicaId, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()  # streams that are being opened or closed

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Stop listening to events."""
        for replica in list(self._feeds):
            self._unfollow(replica)
        while self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)

    def follow(self, replica: ReplicaId, feed: EventFeed) -> None:
        """Listen to a member's events at once: nobody else does."""
        if replica in self._members:
            self._unfollow(replica)
            self._feeds[replica] = (feed, Promised(feed.capacity_blocks))
            self._opening[replica] = self._run(self._listen(replica, feed))

    async def _listen(self, replica: ReplicaId, feed: EventFeed) -> None:
        while True:
            try:
                return await feed.own()
            except OSError as error:
                log.warning("%s: %s", replica, error)
            await asyncio.sleep(OPEN_AGAIN_S)

    def delivered(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note what a request found in the cache."""
        if replica in self._feeds:
            feed, promised = self._feeds[replica]
            promised.keep(chain, time.monotonic())
            feed.delivered(chain, held_blocks)

    def is_exact(self, replica: ReplicaId) -> bool:
        """Whether a member's own events say what it holds."""
        return replica in self._feeds and self._feeds[replica][0].is_exact

    def _unfollow(self, replica: ReplicaId) -> None:
        if feed := self._feeds.pop(replica, None):
            self._opening.pop(replica).cancel()
            self._run(feed[0].release())

    def _run(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def join(self, replica: ReplicaId, namespace: Namespace, capacity_blocks: int) -> None:
        """Admit a replica, empty. The same values again change nothing; other values begin a new life."""
        known = self._members.get(replica)
        if known and known[0] == namespace and known[1].capacity_blocks == capacity_blocks:
            return
        self.leave(replica)
        self._members[replica] = (namespace, Residency(capacity_blocks))
        self._rooms.setdefault(namespace, {})[replica] = self._members[replica][1]

    def leave(self, replica: ReplicaId) -> None:
        """Forget a replica and all that it held."""
        self._unfollow(replica)
        namespace, residency = self._members.pop(replica, (None, None))
        if namespace is not None and residency is not None:
            self.stats.blocks -= len(residency)
            del self._rooms[namespace][replica]
            if not self._rooms[namespace]:
                del self._rooms[namespace]

    async def match(self, namespace: Namespace, chains: Sequence[PrefixChain]) -> Match:
        """Return the holdings of every chain, all exact."""
        self.stats.lookups += 1
        holdings = tuple([self.holding(namespace, chain) for chain in chains])
        if not self._feeds:
            return Match(holdings, "index")
        slower = tuple(self._slower(namespace, chain) for chain in chains)
        feeds = {
            replica: self._feeds[replica][0] for replica in self._feeds.keys() & self._rooms.get(namespace, {}).keys()
        }
        doubts = {replica: doubt for replica, feed in feeds.items() if (doubt := feed.doubt)}
        return Match(holdings, "index", slower if any(map(any, slower)) else (), doubts)

    def holding(self, namespace: Namespace, chain: PrefixChain) -> Holding:
        """Return the holdings of one chain, without waiting."""
        room, feeds = self._rooms.get(namespace, {}), self._feeds
        holding = {}
        for replica, residency in room.items():
            if replica not in feeds and (blocks := residency.held(chain)):
                holding[replica] = blocks
        for replica in feeds.keys() & room.keys() if feeds else ():
            if blocks := self._told(replica, room[replica], chain):
                holding[replica] = blocks
        return holding

    def _told(self, replica: ReplicaId, residency: Residency, chain: PrefixChain) -> int:
        feed, promised = self._feeds[replica]
        if not feed.is_exact:
            return residency.held(chain)
        promised.settle(feed.has_told)
        table = feed.table
        return max(table.reusable(chain), promised.held(chain, time.monotonic(), to_ends=table.ends.are_needed))

    def _slower(self, namespace: Namespace, chain: PrefixChain) -> tuple[Holding, ...]:
        """Return the holdings of each slower tier, of replicas that have one."""
        here = self._feeds.keys() & self._rooms.get(namespace, {}).keys()
        tables = {r: self._feeds[r][0].table for r in here if self._feeds[r][0].is_exact}
        return tuple(
            {r: blocks for r, table in tables.items() if (blocks := table.held(chain, tier))}
            for tier in range(1, len(TIERS))
        )

    def record(self, replica: ReplicaId, chain: PrefixChain, reusable_blocks: int | None = None) -> None:
        """Note that the replica holds all blocks of the chain from now on."""
        if replica in self._feeds:
            self._feeds[replica][1].record(chain, time.monotonic(), reusable_blocks)
        self.apply(replica, chain)

    def answered(self, replica: ReplicaId, chain: PrefixChain) -> None:
        """Note that the replica has generated the last blocks of the chain."""
        self.record(replica, chain, 0)
        if replica in self._feeds:
            self._feeds[replica][1].keep(chain, time.monotonic())

    def correct(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note that the replica turned out to hold only the first `held_blocks` blocks of the chain."""
        if replica in self._feeds:
            self._feeds[replica][1].take_back(chain, held_blocks)
        self.apply(replica, chain, held_blocks)

    def apply(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int | None = None) -> Change | None:
        """Record the chain, or correct it where `held_blocks` is given; None where the replica is not a member."""
        member = self._members.get(replica)
        if member is None:
            return None
        change = member[1].record(chain) if held_blocks is None else member[1].correct(chain, held_blocks)
        lost = sum(map(len, change.evicted)) if change.evicted else 0
        self.stats.blocks += (0 if change.stored is None else len(change.stored)) - lost
        if held_blocks is None:
            self.stats.records += 1
            self.stats.evictions += lost
        return change

    def residency(self, replica: ReplicaId) -> Residency | None:
        """Return what is known of a member's cache."""
        member = self._members.get(replica)
        return member[1] if member else None
