"""One shard of the index as a router knows it: the keys' prefix, the epoch, which slot stands for which replica.

A namespace has S shards (S = 1 unless Redis is a cluster); a replica's bits, log, lease and snapshot lie in one of
them, under one hash tag. This file decodes replies and keeps the registry; it sends nothing.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from kvroute.adapters.index import Namespace
from kvroute.adapters.redis_owner import Owner, Write
from kvroute.adapters.redis_wire import Argument, Reply
from kvroute.kv.block_tree import TIERS
from kvroute.kv.chain import HASH_BYTES, PrefixChain
from kvroute.kv.promised import Promised
from kvroute.kv.residency import Run, common_bytes
from kvroute.routing.replica import ReplicaId

if TYPE_CHECKING:
    from kvroute.adapters.redis_events import EventWriter

SLOTS = 512  # at least as many as beat.lua gives out
LOG_RECORDS_MAX = 20_000  # of one replica between two snapshots; beyond, senders are refused
UNSENT_RECORDS, UNSENT_LOG_BYTES = 32, 64 << 10
PIECE_BLOCKS = 256  # written by one script call, so that no call keeps Redis busy for more than about a millisecond
UNSENT_PIECES_ALONE = 8  # as many leave together where nobody else looks anything up


class Unsent:
    """Writes to one replica's bits, and the records that go with them, which will leave together."""

    __slots__ = ("blocks", "chains", "log_bytes", "records", "writes")

    def __init__(self) -> None:
        self.writes: list[Write] = []
        self.records: list[bytes] = []
        self.chains: list[PrefixChain] = []  # that the replica holds since these records
        self.blocks = self.log_bytes = 0

    def is_full(self, pieces: int = 1) -> bool:
        """Return whether it should leave now, where its blocks may be several pieces; its log entry is one."""
        return (
            self.blocks >= pieces * PIECE_BLOCKS
            or self.log_bytes >= UNSENT_LOG_BYTES
            or len(self.records) >= pieces * UNSENT_RECORDS
        )

    def common_blocks(self, chain: PrefixChain) -> int:
        """Return how many leading blocks of a chain are held since these records."""
        first = chain[:HASH_BYTES]
        return max([common_bytes(chain, one) for one in self.chains if one.startswith(first)], default=0) // HASH_BYTES

    def add(self, writes: Sequence[Write], record: bytes, chain: PrefixChain | None) -> None:
        """Add what belongs to one record: of a chain that is held now, or of a correction."""
        if chain is not None:
            self.chains.append(chain)
        self.writes += writes
        self.records.append(record)
        self.blocks += sum([len(write.run) for write in writes])
        self.log_bytes += len(record)


class Member:
    """A replica that this router serves, in one shard."""

    def __init__(self, replica: ReplicaId, capacity_blocks: int) -> None:
        self.replica = replica
        self.capacity_blocks = capacity_blocks
        self.token: bytes | None = None  # slot and generation, None until registered in this epoch
        self.adopted_s = -math.inf  # when another router began the life that we are in
        self.feed: Iterator[tuple[PrefixChain, int]] | None = None  # what is still to be sent again
        self.is_stale = False  # records were not sent: feed again
        self.feed_after_s = 0.0  # not before, because the last attempt failed
        self.lease: bytes | None = None  # fence and router, while this router owns the replica's log
        self.owner: Owner | None = None  # loaded after the lease was taken
        self.writer: EventWriter | None = None  # where the replica's events are followed
        self.promised: Promised | None = None  # the same
        self.unsent = Unsent()

    @property
    def slot(self) -> bytes:
        assert self.token is not None
        return self.token.partition(b".")[0]

    def forget(self) -> None:
        """Drop everything that belongs to an epoch or a life that is over."""
        self.token, self.feed, self.lease, self.owner = None, None, None, None
        self.unsent = Unsent()


class Shard:
    """One prefix of keys and what this router knows about it."""

    def __init__(self, deployment: str, namespace: Namespace, number: int) -> None:
        self.prefix = f"{{kvr:v1:{deployment}:{namespace}:{number}}}".encode()
        self.namespace = namespace
        self.members: dict[ReplicaId, Member] = {}
        self.is_ready = False  # registered since the link came up: what Redis says here can be understood
        self.epoch = b""
        self.version = b""
        self.tokens: dict[ReplicaId, bytes] = {}  # the registry: of other routers' replicas too
        self.replicas: list[ReplicaId | None] = [None] * SLOTS  # by slot: members in the life that this router knows
        self.fed: dict[int, bytes] = {}  # slots of replicas whose events say what they hold -> state of the stream
        self.doubts: dict[int, float] = {}  # of these, the share of the blocks that is suspect, where any is
        self.is_followed = False  # some member's events are followed
        self.has_tiers = False  # some slots stand for replicas' slower tiers
        self.hybrids: set[ReplicaId] = set()  # of the members, as far as events have told
        self.is_feeding = False  # Redis does not have all yet that this router placed
        self.is_own = False  # all that was ever written here, in this epoch, is this router's
        self.next_beat_s = 0.0
        self.is_sweeping = True  # until Redis says that no dead slot is left

    def read_registry(self, version: bytes, flat: Sequence[bytes]) -> None:
        """Take over the registry."""
        self.tokens = {ReplicaId(flat[i].decode()): flat[i + 1] for i in range(0, len(flat), 2)}
        self.version = version
        self.name_slots()

    def name_slots(self) -> None:
        """Say which slots stand for members: only in the life of a replica that registry and member agree on."""
        agreed = (m for m in self.members.values() if m.token is not None and m.token == self.tokens.get(m.replica))
        self.replicas = [None] * SLOTS
        self.has_tiers = False
        for member in agreed:
            self.replicas[int(member.slot)] = member.replica
            for tier in range(1, len(TIERS)):
                name = tier_name(member.replica, tier)
                if token := self.tokens.get(name):
                    self.replicas[int(token.partition(b".")[0])] = name
                    self.has_tiers = True

    @property
    def is_in_shadow(self) -> bool:
        """Whether the router's shadow has all that is here: nobody else has written, no events say what is held."""
        return self.is_own and self.is_ready and not self.is_followed and not self.fed

    def is_fed(self, member: Member) -> bool:
        """Whether a member's events say what it holds, in this life."""
        return member.token is not None and int(member.slot) in self.fed

    def is_told(self, member: Member) -> bool:
        """Whether a member's events say what it holds, or will as soon as this router has written them."""
        return self.is_fed(member) or (member.writer is not None and member.writer.feed.is_exact)

    def begin_life(self, member: Member, token: bytes, *, is_fed: bool) -> None:
        """Take over a life that this router has just begun in Redis, before the registry says so."""
        member.token, member.owner = token, None
        self.tokens[member.replica] = token
        if is_fed:
            self.fed[int(member.slot)] = b""
        self.name_slots()

    def mark_stale(self, member: Member) -> None:
        """Note that Redis has not all that was placed on a member."""
        member.is_stale = self.is_feeding = True

    def read_lookup(self, reply: Reply, holding: dict[ReplicaId, int]) -> int | None:
        """Add a lookup's answer to `holding`; return its probes, or None where it is of another epoch than ours.

        Raises:
            AttributeError, LookupError, TypeError, ValueError: it is not what lookup.lua answers.
        """
        version, registry, probes = reply[0], reply[1], reply[2]
        if version != self.version:
            if version.partition(b".")[0] != self.epoch:
                self.is_ready = False
                return None
            self.read_registry(version, registry or [])
            self.next_beat_s = 0.0
        replicas, seen = self.replicas, 0
        for at in range(4, len(reply), 2):
            if (depth := reply[at]) < 1:
                raise ValueError(f"a holder of {depth} blocks")
            seen, slots = _slots_beyond(seen, reply[at + 1])
            for slot in slots:
                if (replica := replicas[slot]) is not None:
                    holding[replica] = depth
        if reply[3] or self.hybrids:
            self._end_hits(reply[3] or [], holding)
        return int(probes)

    def _end_hits(self, ends: Sequence[int], holding: dict[ReplicaId, int]) -> None:
        """Shorten what hybrids hold to where their hits may end."""
        self.hybrids.clear()
        for at in range(0, len(ends), 2):
            if (replica := self.replicas[ends[at]]) is None:
                continue
            self.hybrids.add(replica)
            if ends[at + 1] < holding.get(replica, 0):
                holding[replica] = ends[at + 1]
            if not ends[at + 1]:
                holding.pop(replica, None)

    def write(self, member: Member, lease: bytes, log: bytes, writes: Sequence[Write]) -> list[Argument]:
        """Return the arguments of write.lua."""
        assert member.token is not None
        arguments: list[Argument] = [self.epoch, member.replica, member.token, lease, log, LOG_RECORDS_MAX]
        for one in writes:
            arguments += (one.op, one.run.skip, one.run.hashes)
        return arguments


@lru_cache(maxsize=16_384)  # the turns of a conversation, and conversations over one prompt, bring the same sets
def _slots_beyond(seen: int, data: bytes) -> tuple[int, tuple[int, ...]]:
    """Read a set of slots (bits.lua): return the mask with it, and the slots that were not in the mask."""
    mask = seen | int.from_bytes(data[1:], "little") << (8 * data[0])
    return mask, tuple(slot for slot in range(mask.bit_length()) if (mask ^ seen) >> slot & 1)


def tier_name(replica: ReplicaId, tier: int) -> ReplicaId:
    """Name a replica's slower tier as slots.lua does; no replica's own name has a space in it."""
    return ReplicaId(f"{replica} {tier}")


def shard_number(replica: ReplicaId, shards: int) -> int:
    """Return the shard that keeps a replica: the same for every router."""
    return zlib.crc32(replica.encode()) % shards if shards > 1 else 0


def pieces(write: Write) -> list[Write]:
    """Cut a run into pieces that one script call may write; cleared from its tail, so that it stays a prefix."""
    op, run, size = write.op, write.run, PIECE_BLOCKS * HASH_BYTES
    if len(run.hashes) <= size:
        return [write]
    cut = [run.hashes[at : at + size] for at in range(0, len(run.hashes), size)]
    cut_writes = [Write(op, Run(run.skip if i == 0 else 0, hashes)) for i, hashes in enumerate(cut)]
    return cut_writes if op == b"+" else cut_writes[::-1]


def calls(writes: Iterable[Write]) -> list[list[Write]]:
    """Gather writes, in order, into as few calls as may be."""
    gathered: list[list[Write]] = []
    blocks = PIECE_BLOCKS
    for one in writes:
        for write in pieces(one):
            size = len(write.run)
            blocks += size
            if blocks > PIECE_BLOCKS:
                gathered.append([])
                blocks = size
            gathered[-1].append(write)
    return gathered
