"""Chooses a replica for every request, and books it in the same synchronous step.

filter (model, health, drain, avoid) -> admission -> price -> choose -> book -> Lease
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from random import Random

from msgspec import Struct

from kvroute.errors import ConfigError, KvrouteError, NoReplica
from kvroute.routing.admission import Admission, AdmissionSettings, Waits
from kvroute.routing.affinity import Affinity, affinity_of
from kvroute.routing.baselines import BASELINES, baseline_of
from kvroute.routing.cached import weights_of
from kvroute.routing.cost import Slo
from kvroute.routing.demand import Demand
from kvroute.routing.fleet import Fleet
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease, Placement
from kvroute.routing.member import FAILURES_MAX, Member
from kvroute.routing.news import News
from kvroute.routing.offers import Offers, cheapest, tied_of
from kvroute.routing.policy import Case, Knowledge, Policy
from kvroute.routing.refusals import fits, fits_context, refuse_if_hopeless, unknown_model
from kvroute.routing.replica import ReplicaId
from kvroute.routing.shadow import SHADOWS_MAX, Shadows
from kvroute.routing.standing import Foresight
from kvroute.routing.turn import Turn
from kvroute.routing.waiting import Ticket

KVROUTE = "kvroute"
POLICIES = (KVROUTE, *BASELINES)
NOTHING_STORED: Mapping[ReplicaId, int] = {}
TTFT_WEIGHT = 0.8  # agent traces: own and others' decode as heavy as the prefill made first tokens 18 % later


def is_policy(name: str) -> bool:
    """Whether a policy of that name can be followed at any time.

    Raises:
        ConfigError: its figures cannot be read.
    """
    return name in POLICIES or weights_of(name) is not None


class Offer(Struct, frozen=True):
    """What one replica would cost, or why it cannot have the request: a row of the explanation."""

    placement: Placement
    obstacle: str | None  # None = it may have it
    in_flight: int  # sequences, all routers'
    is_chosen: bool = False
    is_tied: bool = False  # it costs no more than the cheapest, as far as costs can tell


class Router:
    """The policy over one fleet. All state is the fleet's, but for a baseline's own turn."""

    def __init__(
        self,
        fleet: Fleet,
        policy: str = KVROUTE,
        rng: Random | None = None,
        *,
        ttft_weight: float = TTFT_WEIGHT,
        slo: Slo | None = None,
        admission: AdmissionSettings | None = None,
        knowledge: Knowledge = "exact",
        shadows: Sequence[str] = (),
    ) -> None:
        self.fleet = fleet
        self._rng = rng or Random(0)
        self._shadow_rng = Random(0)  # a shadow changes nobody else's chances
        self._slo = slo
        self._knowledge: Knowledge = knowledge
        self._admission = affinity_of(policy, admission) or (
            None if admission is None else Admission(admission, name=self._rng.getrandbits(62))
        )
        self.policy = ""
        self.shadows: Shadows | None = None
        self.switch(policy, ttft_weight=ttft_weight, shadows=shadows)

    @property
    def admission(self) -> Admission | None:
        """Who holds requests, None where nothing is held."""
        return self._admission if self.policy == KVROUTE or isinstance(self._admission, Affinity) else None

    @property
    def ttft_weight(self) -> float:
        """How much only the time to the first token counts."""
        return self._ttft_weight

    def switch(self, policy: str, *, ttft_weight: float = TTFT_WEIGHT, shadows: Sequence[str] = ()) -> None:
        """Go on with another policy, weight or shadows. The fleet, leases and what was learnt stay.

        What is held when kvroute's own policy ends is released at the next call of `released`.

        Raises:
            ConfigError: there is no such policy, or too many shadows.
        """
        for param, names in (("routing.policy", (policy,)), ("routing.shadow", tuple(shadows))):
            for name in names:
                if not is_policy(name) and not (not self.policy and affinity_of(name, None)):
                    raise ConfigError(f"{param}: {name!r} is none of {', '.join(POLICIES)}", param=param)
        if len(shadows) > SHADOWS_MAX:
            raise ConfigError(f"routing.shadow: at most {SHADOWS_MAX}, got {len(shadows)}", param="routing.shadow")
        if policy != self.policy:
            make = baseline_of(policy)
            self._baseline: Policy | None = None if make is None else make(self._knowledge)
        self.policy, self._ttft_weight = policy, ttft_weight
        known = () if self.shadows is None else tuple(tally.policy for tally in self.shadows.tallies)
        if known != tuple(shadows):
            self.shadows = Shadows({name: self._shadow(name) for name in shadows}) if shadows else None

    def _shadow(self, name: str) -> Policy:
        make = baseline_of(name)
        if make is not None:
            return make(self._knowledge)
        return lambda members, case: self._best(
            members, self._offers(case.demand, case.hits, NOTHING_STORED), case.demand
        )

    def place(
        self,
        demand: Demand,
        hits: Mapping[ReplicaId, int],
        now: float,
        avoid: AbstractSet[ReplicaId] = frozenset(),
        stored: Mapping[ReplicaId, int] = NOTHING_STORED,
    ) -> Lease:
        """Choose a replica and book it.

        Args:
            demand: the request.
            hits: prompt tokens that each replica need not compute; absent means none.
            now: the router's clock.
            avoid: replicas that have failed this request already.
            stored: prompt tokens that each replica has on any tier; only where it is more than in `hits`.

        Raises:
            BadRequest: no replica serves the model, or none could ever hold the prompt.
            NoReplica: none may take it now.
        """
        self.fleet.advance(now)
        offers = self._offers(demand, hits, stored)
        members = self._near(demand, offers, avoid) or self._candidates(demand, avoid)
        if self._baseline:
            member = self._baseline(members, Case(demand, hits, now, self._rng))
        else:
            member = self._best(members, offers, demand)
        placement = offers.placement(member, self.policy)
        if self.shadows is not None:
            self.shadows.observe(members, Case(demand, hits, now, self._shadow_rng), placement, offers.there)
        return self.fleet.book(member, demand, offers.work(member), placement, now)

    def admit(
        self,
        demand: Demand,
        hits: Mapping[ReplicaId, int],
        now: float,
        avoid: AbstractSet[ReplicaId] = frozenset(),
        hold: Hold | None = None,
        size_bytes: int = 0,
        stored: Mapping[ReplicaId, int] = NOTHING_STORED,
    ) -> Lease | Hold:
        """Place a request, or say that it has to wait until memory fits.

        A request that waits is asked about again when `released` names its hold, or when `hold.until_s` has come, with
        what the index knows by then: it is bound to a replica at the last moment.

        Args:
            demand: the request.
            hits: prompt tokens that each replica need not compute; absent means none.
            now: the router's clock.
            avoid: replicas that have failed this request already.
            hold: what an earlier call returned for this request; the same may come back.
            size_bytes: of the request, which counts against the bound of all that is held; 0 = estimated.
            stored: as for `place`.

        Raises:
            Overloaded: too much is held already, or this request was held for too long.
            BadRequest, NoReplica: as `place`. Whatever is raised, the hold is over.
        """
        admission = self.admission
        if admission is None:
            if hold is not None and self._admission is not None:
                self._admission.drop(hold)  # of the policy that was followed before
            return self.place(demand, hits, now, avoid, stored)
        self.fleet.advance(now)
        admission.advance(now)
        offers = self._offers(demand, hits, stored)
        try:
            members = self._near(demand, offers, avoid) or self._candidates(demand, avoid)
        except KvrouteError:
            if hold is not None:
                admission.drop(hold)
            raise
        ticket = None if hold is None else admission.waiting.get(hold)
        turn = admission.begin(demand, hits, offers.output_tokens) if ticket is None else ticket.turn
        found = self._chosen(admission, turn, offers, members, avoid, is_next=admission.is_next(turn))
        if isinstance(found, Waits):
            return admission.hold(turn, found, hold, hits, size_bytes)
        placement = offers.placement(found, self.policy)
        if self.shadows is not None:
            self.shadows.observe(members, Case(demand, hits, now, self._shadow_rng), placement, offers.there)
        lease = self.fleet.book(found, demand, offers.work(found), placement, now, turn.conversation.common)
        lease.turn = turn
        admission.seat(turn, found, lease, hold)
        admission.plan(demand.model, found, self.fleet.serving(demand.model), self._ttft_weight)
        return lease

    def released(self, now: float) -> Iterator[Hold]:
        """Yield the holds whose requests should be admitted now; admit each before asking for the next.

        Ask whenever a lease has begun or ended, a replica was reported on, and at least every second while any is held.
        One that was named is not named again before it was admitted, held again or dropped.
        """
        admission = self._admission
        if admission is None or not len(admission.waiting):
            return
        if self.admission is None:
            for ticket in admission.waiting.all():
                yield ticket.hold
            return
        self.fleet.advance(now)
        admission.advance(now)
        for ticket in admission.candidates():
            if not ticket.is_woken and self._may_go(admission, ticket):
                ticket.is_woken = True
                yield ticket.hold

    def _may_go(self, admission: Admission, ticket: Ticket) -> bool:
        demand = ticket.hold.demand
        offers = self._offers(demand, ticket.hits, NOTHING_STORED)
        try:
            members = self._near(demand, offers, frozenset()) or self._candidates(demand, frozenset())
        except KvrouteError:  # its driver will be told when it asks
            return False
        found = self._chosen(admission, ticket.turn, offers, members, frozenset(), is_next=True)
        if isinstance(found, Waits):
            admission.look(ticket, found)
        return isinstance(found, Member)

    def set_alone(self, flag: bool) -> None:
        """Say whether there is no other router: then `news` returns nothing, and nothing is kept for it."""
        if self._admission is not None:
            self._admission.is_alone = flag

    def news(self) -> list[News]:
        """Return what happened to conversations here since the last call, for the other routers."""
        if self._admission is None:
            return []
        told = list(self._admission.news)
        self._admission.news.clear()
        return told

    def hear(self, news: Iterable[News], now: float) -> None:
        """Take in what other routers tell of conversations."""
        if self._admission is None:
            return
        self._admission.advance(now)
        for one in news:
            self._admission.hear(one, self.fleet.capacity_tokens(one.replica))

    def drop(self, hold: Hold, now: float) -> None:
        """Forget a request that waits: its client has left, or will not wait any longer."""
        if self._admission is not None:
            self._admission.advance(now)
            self._admission.drop(hold)

    def explain(
        self,
        demand: Demand,
        hits: Mapping[ReplicaId, int],
        now: float,
        avoid: AbstractSet[ReplicaId] = frozenset(),
        stored: Mapping[ReplicaId, int] = NOTHING_STORED,
    ) -> list[Offer]:
        """Return what every replica of the model would cost now, the cheapest first; nothing is booked."""
        offers = self._offers(demand, hits, stored)
        members = self.fleet.serving(demand.model)
        open_ = [member for member in members if obstacle(member, demand, avoid) is None]
        best = self._best(open_, offers, demand) if open_ else None
        tied = tied_of(open_, offers.costs(open_), demand) if open_ else []
        rows = [
            Offer(
                offers.placement(member, self.policy),
                obstacle(member, demand, avoid),
                member.view.sequences,
                member is best,
                member in tied,
            )
            for member in members
        ]
        return sorted(rows, key=lambda row: (not row.is_chosen, row.obstacle is not None, row.placement.cost_s))

    def foresee(
        self,
        demand: Demand,
        hits: Mapping[ReplicaId, int],
        now: float,
        stored: Mapping[ReplicaId, int] = NOTHING_STORED,
    ) -> Foresight | None:
        """Return what admission would say to a request now, None where nothing is ever held; nothing is booked.

        What a later turn would itself teach about its conversation is not counted in.

        Raises:
            BadRequest, NoReplica: as `place`.
        """
        self.fleet.advance(now)
        members = self._candidates(demand, frozenset())
        if self.admission is None:
            return None
        self.admission.advance(now)
        chances = self._offers(demand, hits, stored).chances(members, self._slo)
        return self.admission.foresee(demand, hits, self.fleet.outputs.expect(demand), chances)

    def _offers(self, demand: Demand, hits: Mapping[ReplicaId, int], stored: Mapping[ReplicaId, int]) -> Offers:
        return Offers(demand, hits, stored, self.fleet.outputs.expect(demand), self._ttft_weight)

    def _best(self, members: Sequence[Member], offers: Offers, demand: Demand) -> Member:
        """Return the cheapest; with an SLO, of those that meet it, if any does."""
        if self._slo is not None:
            members = [member for member in members if offers.meets(self._slo, member)] or members
        return cheapest(members, offers.costs(members), demand)

    def _near(self, demand: Demand, offers: Offers, avoid: AbstractSet[ReplicaId]) -> list[Member] | None:
        """Return only the cheapest of many members; None where all have to be looked at."""
        if self._baseline or self._slo is not None or self.shadows is not None or offers.use_lower_tiers:
            return None
        shortlist = self.fleet.shortlist(demand.model)
        if shortlist is None:
            return None

        def may_have(member: Member) -> bool:
            return member.is_available and member.replica.id not in avoid and fits(demand, member)

        found = offers.nearest(shortlist, may_have)
        return None if found is None else [found]

    def _chosen(
        self, admission: Admission, turn: Turn, offers: Offers, members: list[Member], avoid: AbstractSet[ReplicaId],
        *, is_next: bool,
    ) -> Member | Waits:  # fmt: skip
        """Have admission choose; where the nearest has no place for the conversation, of all members."""
        found = admission.choose(turn, offers.chances(members, self._slo), is_next=is_next)
        if isinstance(found, Waits) and not found.at_gate:
            everybody = self._candidates(turn.demand, avoid)
            if len(everybody) > len(members):
                return admission.choose(turn, offers.chances(everybody, self._slo), is_next=is_next)
        return found

    def _candidates(self, demand: Demand, avoid: AbstractSet[ReplicaId]) -> list[Member]:
        serving = self.fleet.serving(demand.model)
        if not serving and self.fleet.is_complete():
            raise unknown_model(demand.model)
        found = []
        for member in serving:
            if member.is_available and member.replica.id not in avoid and fits(demand, member):
                found.append(member)
        if not found:
            refuse_if_hopeless(demand, serving)
            raise NoReplica(nobody(demand, serving, avoid))
        return found


def obstacle(member: Member, demand: Demand, avoid: AbstractSet[ReplicaId]) -> str | None:
    """Return why a replica cannot have a request, None where it can."""
    reasons = (
        (not member.is_healthy, "unhealthy"),
        (member.is_draining, "draining"),
        (member.failures >= FAILURES_MAX, "failing"),
        (member.replica.id in avoid, "failed this request"),
        (demand.exact and not fits_context(demand, member), "context too short"),
        (not fits(demand, member), "cache too small"),
    )
    return next((reason for holds, reason in reasons if holds), None)


def nobody(demand: Demand, serving: Sequence[Member], avoid: AbstractSet[ReplicaId]) -> str:
    """Say why no replica can take a request now."""
    if not serving:
        return f"no replica is known to serve `{demand.model}` yet"
    reasons = ", ".join(f"{member.replica.id}: {obstacle(member, demand, avoid)}" for member in serving[:8])
    return f"no replica of `{demand.model}` can take the request now ({reasons})"
