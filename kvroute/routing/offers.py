"""What one request would cost on any replica, and who is the cheapest.

Ties. Two costs are equal when they differ by less than TIE_SHARE of what computing this prompt from nothing would take.
That is the natural unit of a placement: it neither grows with a long answer, which costs the same everywhere, nor
vanishes when everything is cached. Ties go to the fewest in flight, then to the least recently chosen, so that paced
traffic, where nothing is in flight when the next request comes, still reaches every replica.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from kvroute.routing.admission import Chances
from kvroute.routing.cost import Slo, Work, compute_tokens, total_s, work_of
from kvroute.routing.demand import Demand
from kvroute.routing.lease import Placement
from kvroute.routing.member import Member
from kvroute.routing.rates import Rates
from kvroute.routing.replica import ReplicaId
from kvroute.routing.shortlist import Shortlist, asked_of

TIE_SHARE = 0.01
NOT_MET_S = 1e6  # longer than anything costs


class Offers:
    """Prices of one request on any replica. Replicas that hold equally much share the work's description."""

    def __init__(
        self,
        demand: Demand,
        hits: Mapping[ReplicaId, int],
        stored: Mapping[ReplicaId, int],
        output_tokens: float,
        ttft_weight: float,
    ) -> None:
        self._demand = demand
        self._hits = hits
        self._stored = stored
        self.output_tokens = output_tokens  # expected of each answer
        self._ttft_weight = ttft_weight
        self._works: dict[int, Work] = {}

    def work(self, member: Member) -> Work:
        """Return what the request asks of a replica. One token is always computed, so not all can be hits."""
        demand = self._demand
        hit = self._hits.get(member.replica.id, 0)
        if self._stored or demand.model in member.adapters:
            return self._special(member, hit)
        work = self._works.get(hit)
        if work is None:
            work = self._works[hit] = self._work_of(hit, member.rates)
        return work

    def _work_of(self, hit: int, rates: Rates, copy: int = 0, *, loads_adapter: bool = False) -> Work:
        demand = self._demand
        hit_tokens = max(min(hit, demand.prompt_tokens - 1), 0)
        return work_of(
            hit_tokens, demand.prompt_tokens - hit_tokens, self.output_tokens, demand.sequences,
            copy_tokens=min(copy, hit_tokens), loads_adapter=loads_adapter,
            attention_tokens=rates.attention_tokens,
        )  # fmt: skip

    def _special(self, member: Member, hit: int) -> Work:
        """Describe what lower tiers and adapters change."""
        stored = max(self._stored.get(member.replica.id, 0), hit)
        model = self._demand.model
        loads = model in member.adapters and member.loads_adapter(model)
        return self._work_of(stored, member.rates, stored - hit, loads_adapter=loads)

    @property
    def use_lower_tiers(self) -> bool:
        """Whether replicas that hold equally much may cost differently to read from."""
        return bool(self._stored)

    def nearest(self, shortlist: Shortlist, may_have: Callable[[Member], bool]) -> Member | None:
        """Return whom a price for every member of a shortlist would choose."""
        usual, deeper = shortlist.deeper(self._hits)
        asked = asked_of(self._work_of(usual, shortlist.rates), shortlist.rates, self._ttft_weight)
        tie_tokens = TIE_SHARE * compute_tokens(0, self._demand.prompt_tokens)
        return shortlist.cheapest(
            asked, deeper, may_have, self.cost_s, lambda member: tie_tokens * member.rates.token_s
        )

    def meets(self, slo: Slo, member: Member) -> bool:
        """Return whether the request would get what it should there."""
        return slo.is_met(member.view, self.work(member), member.rates)

    def cost_s(self, member: Member) -> float:
        """Return the seconds that the request costs on one."""
        return total_s(member.view, self.work(member), member.rates, self._ttft_weight)

    def costs(self, members: Sequence[Member]) -> list[float]:
        """Return the seconds that the request costs on each."""
        weight, work = self._ttft_weight, self.work
        return [total_s(member.view, work(member), member.rates, weight) for member in members]

    def chances(self, members: Sequence[Member], slo: Slo | None) -> Chances:
        """Return what the request would be on each; where some meet an SLO, the others come after all of them."""
        costs_s = self.costs(members)
        if slo is not None:
            met = [self.meets(slo, member) for member in members]
            costs_s = [cost if good else cost + NOT_MET_S for cost, good in zip(costs_s, met, strict=True)]
        return Chances(members, self.work, costs_s, tie_s(members, costs_s, self._demand))

    def there(self, member: Member) -> Placement:
        """Return the price of a choice that is not followed."""
        return self.placement(member, "")

    def placement(self, member: Member, policy: str) -> Placement:
        """Return the price with its reasons."""
        view, work, rates, weight = member.view, self.work(member), member.rates, self._ttft_weight
        cost_s = total_s(view, work, rates, weight)
        return Placement(
            member.replica.id, work.hit_tokens, work.miss_tokens, policy, cost_s, view, work, rates, weight
        )


def cheapest(members: Sequence[Member], costs_s: Sequence[float], demand: Demand) -> Member:
    """Return the member of lowest cost; among ties by fewest in flight, then least recently chosen."""
    if len(members) == 1:
        return members[0]
    tied = tied_of(members, costs_s, demand)
    return tied[0] if len(tied) == 1 else min(tied, key=lambda member: (member.view.sequences, member.last_chosen))


def tie_s(members: Sequence[Member], costs_s: Sequence[float], demand: Demand) -> float:
    """Return the difference up to which costs are equal."""
    token_s = members[costs_s.index(min(costs_s))].rates.token_s
    return TIE_SHARE * compute_tokens(0, demand.prompt_tokens) * token_s


def tied_of(members: Sequence[Member], costs_s: Sequence[float], demand: Demand) -> list[Member]:
    """Return the members whose costs are the lowest one, or no different from it."""
    limit = min(costs_s) + tie_s(members, costs_s, demand)
    return [member for member, cost in zip(members, costs_s, strict=True) if cost <= limit]
