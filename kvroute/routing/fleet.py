"""All replicas as this router sees them: who they are, how they are, what was promised to them.

The one owner of this state. Feeds put in what they learn (`join`, `report`, `set_health`), the router books, and leases
give back. Everything is synchronous, so nothing can come between choosing a replica and booking it.

    <Fleet r0: 2 running, 31 blocks pending | r1: draining>
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.routing.cost import Work
from kvroute.routing.demand import Demand, Prefix, Promise
from kvroute.routing.lease import Lease, Placement
from kvroute.routing.member import FAILURES_MAX, NOTHING, Booking, Member
from kvroute.routing.outputs import OutputEstimates
from kvroute.routing.rates import SEED, RateBook, Rates
from kvroute.routing.replica import Load, Replica, ReplicaId
from kvroute.routing.shortlist import Shortlist, shortlist_of

REPLICAS_MAX = 4096
RESERVE_ABOVE = 0.7  # share of promised KV from which a booking is confirmed in the shared ledger
PRESUME_AFTER = 1.5  # times the estimate, after which an unseen prefill is taken to be over


class ReplicaState(Struct, frozen=True):
    """A replica at one moment, for people and metrics."""

    replica: Replica
    is_healthy: bool
    is_draining: bool
    is_available: bool  # healthy, not draining, and not failing requests one after the other
    failures: int  # consecutive
    promised: Promise  # this router's
    others: Promise  # the other routers'
    running: int  # this router's sequences that have begun
    load: Load  # its last report
    pinned_share: float  # of hits, that requests hold alone
    rates: Rates


class Fleet:
    """The replicas, by id and by the models that they serve. Bounded by REPLICAS_MAX."""

    def __init__(self, seed: Rates = SEED) -> None:
        self.outputs = OutputEstimates()
        self._rates = RateBook(seed)
        self._members: dict[ReplicaId, Member] = {}
        self._serving: dict[str, list[Member]] = {}
        self._joined = 0
        self._placed = 0
        self._shortlists: dict[str, Shortlist | None] = {}
        self._strays: list[tuple[float, int, Member]] = []  # heap by due time: whose report will be too old
        self._unseen: list[tuple[float, int, Lease]] = []  # heap by due time: leases without a telling first byte

    def __repr__(self) -> str:
        return f"<Fleet {' | '.join(map(describe, self._members.values())) or 'empty'}>"

    def join(self, replica: Replica, now: float) -> None:
        """Admit a replica, healthy until told otherwise; one that is known is updated and keeps its leases.

        Raises:
            ConfigError: there are too many.
        """
        if replica.id in self._members:
            self.update(replica)
            return
        if len(self._members) >= REPLICAS_MAX:
            raise ConfigError(f"replica {replica.id}: one router handles at most {REPLICAS_MAX} replicas")
        self._joined += 1
        member = self._members[replica.id] = Member(replica, self._joined, self._rates.of(base_of(replica)))
        self._list(member)

    def update(self, replica: Replica) -> None:
        """Take on what a known replica says about itself; an unknown one is left alone."""
        if member := self._members.get(replica.id):
            member.adopt(replica, self._rates.of(base_of(replica)))
            self._sort()

    def seed(self, base: str, rates: Rates) -> None:
        """Say how fast replicas of a base model should be, before any of them has joined."""
        self._rates.seed(base, rates)

    def leave(self, id: ReplicaId) -> None:
        """Forget a replica. Leases under way there settle as usual and touch no later replica of that id."""
        if member := self._members.pop(id, None):
            member.watched = []
            self._sort()

    def report(self, id: ReplicaId, load: Load, now: float) -> None:
        """Take in what a replica's metrics said."""
        if member := self._members.get(id):
            had_stray = member.stray_until_s < inf
            member.report(load, now)
            if member.stray_until_s < inf and not had_stray:
                heappush(self._strays, (member.stray_until_s, member.number, member))

    def set_health(self, id: ReplicaId, healthy: bool) -> None:
        """Take in what health checks say. A healthy one is forgiven its failed requests."""
        if member := self._members.get(id):
            member.is_healthy = healthy
            if healthy:
                member.failures = 0

    def is_failing(self, id: ReplicaId) -> bool:
        """Return whether requests fail there one after the other, whatever health checks say."""
        member = self._members.get(id)
        return member is not None and member.failures >= FAILURES_MAX

    def set_draining(self, id: ReplicaId, flag: bool) -> None:
        """Stop or resume placing on a replica; what runs there goes on."""
        if member := self._members.get(id):
            member.is_draining = flag

    def set_others(self, promises: Mapping[ReplicaId, Promise]) -> None:
        """Take in what all other routers promised, summed; a replica that is absent has nothing from them."""
        for id, member in self._members.items():
            member.set_others(promises.get(id, NOTHING))

    def promises(self) -> dict[ReplicaId, Promise]:
        """Return what this router promised, for every replica."""
        return {id: member.promise for id, member in self._members.items()}

    def replicas(self) -> tuple[Replica, ...]:
        """Return all replicas in the order of joining."""
        return tuple(member.replica for member in self._members.values())

    def capacity_tokens(self, id: str) -> int:
        """Return what a replica's cache holds, 0 where that is not known."""
        member = self._members.get(ReplicaId(id))
        return (member.replica.capacity_tokens or 0) if member else 0

    def models(self) -> tuple[str, ...]:
        """Return the names of all models and adapters that any replica serves."""
        return tuple(self._serving)

    def states(self) -> tuple[ReplicaState, ...]:
        """Return every replica's state in the order of joining."""
        return tuple(map(state_of, self._members.values()))

    def serving(self, model: str) -> Sequence[Member]:
        """Return the members that serve a model or adapter, whatever their health, in the order of joining."""
        return self._serving.get(model, ())

    def shortlist(self, model: str) -> Shortlist | None:
        """Return what finds the cheapest of the members that serve a model, None where all can be priced."""
        if model not in self._shortlists and model in self._serving:
            self._shortlists[model] = shortlist_of(model, self._serving[model])
        return self._shortlists.get(model)

    def is_complete(self) -> bool:
        """Return whether there are replicas and all of them have said what they serve."""
        return bool(self._members) and all(member.replica.cards for member in self._members.values())

    def book(
        self, member: Member, demand: Demand, work: Work, placement: Placement, now: float, prefix: Prefix | None = None
    ) -> Lease:
        """Book a place. The lease that comes back owes it. `prefix` is what the request shares with others."""
        if prefix is not None and work.hit_tokens >= prefix.tokens and prefix.hash not in member.prefixes:
            member.share(prefix)
        view, output_tokens = member.view, int(work.sequences * work.output_tokens)
        added, prefix = member.asks(work, prefix)
        own = added - member.missing(prefix)
        all_tokens = work.hit_tokens - work.copy_tokens + work.new_tokens
        booking = Booking(
            work.sequences, work.miss_tokens, int(own), work.hit_tokens, output_tokens, prefix,
            int(all_tokens - own) if prefix is None else 0,
            self.outputs.spread(demand.model), demand.chain, demand.block_size,
        )  # fmt: skip
        member.book(booking)
        member.use_adapter(demand.model)
        self._placed += 1
        member.last_chosen = self._placed
        capacity = member.replica.capacity_tokens
        is_tight = capacity is not None and member.view.kv_tokens > RESERVE_ABOVE * capacity
        lease = Lease(
            member, demand, work, placement, booking=booking, now=now,
            reserve_tokens=int(added) if is_tight else 0,
            reserve_limit_tokens=max(capacity or 0, view.kv_tokens + int(added)),
            ahead_tokens=view.pending_prefill_tokens, outputs=self.outputs,
        )  # fmt: skip
        if not demand.streamed:
            due = now + PRESUME_AFTER * placement.first_token_s
            heappush(self._unseen, (due, self._placed, lease))
        return lease

    def advance(self, now: float) -> None:
        """Let time pass: prefills that no first byte will report are over, old reports are no longer believed."""
        while self._unseen and self._unseen[0][0] <= now:
            heappop(self._unseen)[2].presume_began()
        while self._strays and self._strays[0][0] < now:
            _, number, member = heappop(self._strays)
            if member.stray_until_s < now:
                member.forget_stray()
            elif member.stray_until_s < inf:
                heappush(self._strays, (member.stray_until_s, number, member))

    def _sort(self) -> None:
        self._serving = {}
        for member in self._members.values():
            self._list(member)

    def _list(self, member: Member) -> None:
        if self._shortlists:
            self._shortlists = {}
            for each in self._members.values():
                each.watched = []
        for name in member.prompt_limits:
            self._serving.setdefault(name, []).append(member)


def base_of(replica: Replica) -> str:
    """Return the name of the base model, which decides how fast a replica is."""
    first = next((card for card in replica.cards if card.parent is None), None)
    return first.name if first else next((card.parent for card in replica.cards if card.parent), "")


def state_of(member: Member) -> ReplicaState:
    """Return a member's state as a value."""
    return ReplicaState(
        member.replica, member.is_healthy, member.is_draining, member.is_available, member.failures,
        member.promise, member.others, member.running, member.load, member.pinned.value, member.rates,
    )  # fmt: skip


def describe(member: Member) -> str:
    """Return a member in a few words."""
    flags = [word for word, holds in (("unhealthy", not member.is_healthy), ("draining", member.is_draining)) if holds]
    if member.failures:
        flags.append(f"{member.failures} failed")
    if member.requests or not flags:
        size = member.replica.block_size
        pending = -(-member.prefill_tokens // (size or 1))
        flags += [f"{member.running} running", f"{pending} {'blocks' if size else 'tokens'} pending"]
    return f"{member.replica.id}: {', '.join(flags)}"
