"""The few of many replicas that can be the cheapest for a request, without a price for each of the others.

Replicas stand in groups. Of every replica a row of figures is kept, and of every group the least of each figure; both
are made anew after a change. A request turns such a row into seconds that the replica costs at the least, a group's
row into seconds that none of it can undercut. Groups are opened in that order, until the next one is dearer than the
best price found. Replicas that hold more of the prompt than most are priced in any case.

    at least = fixed + wait + prefill + delay + stall + decode + eviction of a full cache

which is the whole price where nothing overflows (`cost`). Not known here: who may have the request, and admission.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct

from kvroute.routing.cost import Work
from kvroute.routing.member import Member
from kvroute.routing.rates import Rates
from kvroute.routing.replica import ReplicaId

REPLICAS_MIN = 64  # fewer are all priced
GROUP = 32
ROUNDING = 1.0 - 1e-9
Row = tuple[float, float, float, float, float, float]


class Asked(Struct, frozen=True):
    """A request's side of the bound."""

    fixed_s: float
    token_s: float
    compute_tokens: float
    stall_tokens: float  # the same, by what the stall of others counts
    new_tokens: float
    decode_s: float  # of the answer in an empty batch, by what it counts
    growth: float  # of each step by this request

    def at_least_s(self, row: Row) -> float:
        """Return the seconds that a row cannot undercut."""
        pending, prefill, running, evicted, step, steps = row
        tokens = pending + self.compute_tokens * prefill + self.stall_tokens * running + self.new_tokens * evicted
        return ROUNDING * (self.fixed_s + self.token_s * tokens + self.decode_s * (step + self.growth * steps))


def asked_of(work: Work, rates: Rates, ttft_weight: float) -> Asked:
    """Return what the bound needs to know of a request."""
    rest = 1.0 - ttft_weight
    return Asked(
        fixed_s=rates.fixed_s,
        token_s=rates.token_s,
        compute_tokens=work.compute_tokens,
        stall_tokens=rest * work.compute_tokens,
        new_tokens=work.new_tokens,
        decode_s=rest * work.output_tokens * rates.step_s,
        growth=rates.growth_at(work.sequences, work.hit_tokens + work.miss_tokens),
    )


def row_of(member: Member, published: Rates) -> Row:
    """Return a replica's side of the bound, in tokens and steps of a replica of its model's usual speed."""
    view, rates = member.view, member.rates
    prefill, step = rates.token_s / published.token_s, rates.step_s / published.step_s
    is_full = view.capacity_tokens is not None and view.filled_tokens >= view.capacity_tokens > 0
    return (
        view.pending_prefill_tokens * prefill,
        prefill * (1.0 + view.busy),
        view.running * prefill,
        view.reuse_share * prefill if is_full else 0.0,
        step * (1.0 + rates.growth_at(view.sequences, view.kv_tokens)),
        step * (1 + view.running),
    )


class Group:
    """Some replicas and their rows."""

    __slots__ = ("is_stale", "least", "members", "rows", "slowest")

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.rows: list[Row] = []
        self.least: Row = (0.0,) * 6
        self.slowest = 1.0  # prefill of the slowest one, in those of its model's usual speed
        self.is_stale = True
        for member in members:
            member.groups.append(self)

    def refresh(self, published: Rates) -> None:
        """Make the rows anew."""
        self.is_stale = False
        self.rows = [row_of(member, published) for member in self.members]
        pending, prefill, running, evicted, step, steps = map(min, zip(*self.rows, strict=True))
        self.slowest = max(member.rates.token_s for member in self.members) / published.token_s
        self.least = (pending, prefill, running, evicted, step, steps)


class Shortlist:
    """All replicas of one model. They share what was learnt about its speed."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._groups = [Group(members[at : at + GROUP]) for at in range(0, len(members), GROUP)]
        self._by_id = {member.replica.id: member for member in members}
        self._rates = members[0].model_rates

    @property
    def rates(self) -> Rates:
        """How fast replicas of this model usually are."""
        return self._rates.published

    def deeper(self, hits: Mapping[ReplicaId, int]) -> tuple[int, list[Member]]:
        """Return tokens that nobody exceeds but the members beside them."""
        if len(hits) <= REPLICAS_MIN:
            return 0, [self._by_id[id] for id in hits if id in self._by_id]
        usual = min(hits.values())
        return usual, [self._by_id[id] for id, tokens in hits.items() if tokens > usual and id in self._by_id]

    def cheapest(
        self, asked: Asked, deeper: Iterable[Member], may_have: Callable[[Member], bool],
        cost_s: Callable[[Member], float], tie_tokens: float,
    ) -> list[Member]:  # fmt: skip
        """Return all members whose cost is the least or is no more than the time for `tie_tokens` above it.

        Some others may be among them.
        """
        published = self.rates
        bounds, slowest = [], 1.0
        for at, group in enumerate(self._groups):
            if group.is_stale:
                group.refresh(published)
            slowest = max(slowest, group.slowest)
            bounds.append((asked.at_least_s(group.least), at))
        bounds.sort()
        tie_s = tie_tokens * published.token_s * slowest
        members = [member for member in deeper if may_have(member)]
        limit_s = min(map(cost_s, members), default=inf) + tie_s
        priced = set(members)
        for bound_s, at in bounds:
            if bound_s > limit_s:
                break
            group = self._groups[at]
            for member, row in zip(group.members, group.rows, strict=True):
                if asked.at_least_s(row) > limit_s or member in priced or not may_have(member):
                    continue
                members.append(member)
                limit_s = min(limit_s, cost_s(member) + tie_s)
        return sorted(members, key=lambda member: member.number)


def shortlist_of(model: str, members: Sequence[Member]) -> Shortlist | None:
    """Return a shortlist of enough replicas that learn together, None where all have to be priced."""
    if len(members) < REPLICAS_MIN or any(model in member.adapters for member in members):
        return None
    same = all(member.model_rates is members[0].model_rates for member in members)
    return Shortlist(members) if same else None
