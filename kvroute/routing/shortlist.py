"""The cheapest of many replicas for a request, without a price for each of them.

Replicas stand in groups. Of every replica a row of figures is kept, and of every group the least of each figure; what
has changed is made anew before the next request. A request turns a replica's row into seconds that it costs at the
least, and a group's row into seconds that none of it can undercut. Groups are opened in that order until the next one
is dearer than the best price found. Replicas that hold more of the prompt than most are priced in any case.

    at least = fixed + wait + prefill + delay + stall + decode + eviction of a full cache

which is the whole price where nothing overflows (`cost`). Ties go as everywhere to the fewest in flight, then to the
least recently chosen: of those that might tie only who would win is priced.

Not known here: who may have the request, and admission.
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
ROUNDING = 1.0 - 1e-9  # of sums in another order: a bound may lie so little above the price
Row = tuple[float, float, float, float, float, float, float]


class Asked(Struct, frozen=True):
    """A request's side of the bound."""

    fixed_s: float
    token_s: float
    step_s: float
    compute_tokens: float
    stall_tokens: float  # the same, by what the stall of others counts
    new_tokens: float
    decode_s: float  # of the answer in an empty batch, by what it counts
    growth: float  # of each step by this request

    def at_least_s(self, rows: Sequence[Row]) -> list[float]:
        """Return the seconds that each row cannot undercut."""
        token_s, step_s, fixed_s, decode_s, growth = (
            self.token_s, self.step_s, self.fixed_s, self.decode_s, self.growth,
        )  # fmt: skip
        compute, stall, new = self.compute_tokens, self.stall_tokens, self.new_tokens
        return [
            fixed_s
            + step_s * under_way
            + token_s * (pending + compute * prefill + stall * running + new * evicted)
            + decode_s * (step + growth * steps)
            for under_way, pending, prefill, running, evicted, step, steps in rows
        ]


def asked_of(work: Work, rates: Rates, ttft_weight: float) -> Asked:
    """Return what the bound needs to know of a request."""
    rest = 1.0 - ttft_weight
    return Asked(
        fixed_s=rates.fixed_s,
        token_s=rates.token_s,
        step_s=rates.step_s,
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
        step * (1.0 + rates.growth_at(view.running, view.kv_tokens)) if view.running else 0.0,
        view.pending_prefill_tokens * prefill,
        prefill * (1.0 + view.busy),
        view.running * prefill,
        view.reuse_share * prefill if is_full else 0.0,
        step * (1.0 + rates.growth_at(view.sequences, view.kv_tokens)),
        step * (1 + view.running),
    )


def turn_of(member: Member) -> tuple[int, int, int]:
    """Return what decides between replicas that cost the same; the least goes first."""
    return (member.view.sequences, member.last_chosen, member.number)


class Group:
    """Some replicas and their rows."""

    __slots__ = ("changed", "least", "members", "rows", "turn", "turns")

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.rows: list[Row] = [(0.0,) * 7] * len(members)
        self.least: Row = self.rows[0]
        self.turns = [(0, 0, 0)] * len(members)
        self.turn = (0, 0, 0)  # the least of them
        self.changed = set(range(len(members)))  # places whose rows are old
        for at, member in enumerate(members):
            member.watched.append((self.changed, at))

    def refresh(self, published: Rates) -> None:
        """Make old rows anew."""
        for at in self.changed:
            self.rows[at] = row_of(self.members[at], published)
            self.turns[at] = turn_of(self.members[at])
        self.changed.clear()
        under_way, pending, prefill, running, evicted, step, steps = map(min, zip(*self.rows, strict=True))
        self.least = (under_way, pending, prefill, running, evicted, step, steps)
        self.turn = min(self.turns)


class Shortlist:
    """All replicas of one model. They share what was learnt about its speed."""

    def __init__(self, members: Sequence[Member], group: int = GROUP) -> None:
        self._groups = [Group(members[at : at + group]) for at in range(0, len(members), group)]
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
        cost_s: Callable[[Member], float], tie_s: Callable[[Member], float],
    ) -> Member | None:  # fmt: skip
        """Return the member of lowest cost, of those that tie the one whose turn it is; None where none may have it.

        Args:
            asked: the request, holding as much as any that is not among `deeper`.
            deeper: members that are priced in any case.
            may_have: whether one may have it.
            cost_s: what it costs on one.
            tie_s: what may be added to the lowest cost for another to be equal to it.
        """
        groups, published = self._groups, self.rates
        for group in groups:
            if group.changed:
                group.refresh(published)
        bounds = asked.at_least_s([group.least for group in groups])
        order = sorted(range(len(groups)), key=bounds.__getitem__)
        known = {member: cost_s(member) for member in deeper if may_have(member)}
        best = min(known, key=known.__getitem__, default=None)
        least_s = inf if best is None else known[best]
        opened: dict[int, list[float]] = {}

        def rows_of(at: int) -> list[float]:
            if at not in opened:
                opened[at] = asked.at_least_s(groups[at].rows)
            return opened[at]

        for at in order:
            if bounds[at] >= least_s * ROUNDING:
                break
            for member, bound_s in zip(groups[at].members, rows_of(at), strict=True):
                if bound_s < least_s * ROUNDING and member not in known and may_have(member):
                    cost = known[member] = cost_s(member)
                    if cost < least_s:
                        best, least_s = member, cost
        if best is None:
            return None
        limit_s = least_s + tie_s(best)
        winner = min((member for member, cost in known.items() if cost <= limit_s), key=turn_of)
        turn = turn_of(winner)
        for at in order:
            group = groups[at]
            if bounds[at] * ROUNDING > limit_s:
                break
            if group.turn >= turn:
                continue
            for member, bound_s, its_turn in zip(group.members, rows_of(at), group.turns, strict=True):
                if its_turn >= turn or bound_s * ROUNDING > limit_s or member in known:
                    continue
                if may_have(member) and cost_s(member) <= limit_s:
                    winner, turn = member, its_turn
        return winner


def shortlist_of(model: str, members: Sequence[Member]) -> Shortlist | None:
    """Return a shortlist of enough replicas that learn together, None where all have to be priced."""
    if len(members) < REPLICAS_MIN or any(model in member.adapters for member in members):
        return None
    same = all(member.model_rates is members[0].model_rates for member in members)
    return Shortlist(members) if same else None
