"""One router of a simulation: production's own `Router` and `Fleet`, with its knowledge of caches and its holds.

Routers that share exchange their promises as production does: absolute rows, late and sometimes lost, and bookings that
are confirmed where memory is tight. What is not here: how requests come and go, and the engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from kvroute.errors import NoReplica
from kvroute.routing.demand import Demand, Promise
from kvroute.routing.fleet import Fleet
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import KVROUTE, Router
from kvroute.sim.simulation_knowledge import Knowledge
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings


def id_of(number: int) -> ReplicaId:
    """Name a replica."""
    return ReplicaId(f"r{number}")


def number_of(id: ReplicaId) -> int:
    """Return a replica's number."""
    return int(id[1:])


def replica_of(number: int, engine: EngineSettings) -> Replica:
    """Return what a router is told of an engine."""
    card = ModelCard(engine.model, engine.context_tokens)
    return Replica(
        id=id_of(number),
        url=f"http://{id_of(number)}",
        cards=(card,),
        block_size=engine.block_size,
        capacity_tokens=engine.num_blocks * engine.block_size,
        max_num_seqs=engine.limits.max_num_seqs,
    )


class Front:
    """A router and what it knows."""

    def __init__(self, settings: RouterSettings, engine: EngineSettings, knowledge: Knowledge, rng: Random) -> None:
        self.fleet = Fleet(settings.rates)
        self.fleet.seed(engine.model, settings.rates)
        self.router = Router(
            self.fleet,
            settings.policy,
            rng,
            ttft_weight=settings.ttft_weight,
            admission=settings.admission,
            knowledge="original" if settings.knowledge == "original" else "exact",
        )
        self.knowledge = knowledge
        self.is_dirty = False  # promises changed since they were published
        self.published: dict[ReplicaId, Promise] = {}
        self.others: dict[ReplicaId, Promise] = {}
        self._confirms = settings.policy == KVROUTE
        self._block_size = engine.block_size

    def place(
        self,
        demand: Demand,
        now_s: float,
        avoid: frozenset[ReplicaId],
        hold: Hold | None,
        ledger: Sequence[Front],
    ) -> Lease | Hold:
        """Place a request; where memory is tight, have the booking confirmed among all routers, else place again.

        Raises:
            NoReplica, BadRequest, Overloaded: as `Router.admit`.
        """
        size = self._block_size
        hits = {id: blocks * size for id, blocks in self.knowledge.holding(demand.chain).items()}
        self.is_dirty = True
        answer = self.router.admit(demand, hits, now_s, avoid, hold)
        refused: set[ReplicaId] = set()
        while isinstance(answer, Lease) and answer.reserve_tokens and self._confirms:
            if is_confirmed(answer, ledger):
                break
            answer.refuse(now_s)
            refused.add(answer.replica.id)
            try:
                answer = self.router.place(demand, hits, now_s, avoid | refused)
            except NoReplica:
                return self.router.place(demand, hits, now_s, avoid)
        return answer


def is_confirmed(lease: Lease, ledger: Sequence[Front]) -> bool:
    """Return whether a booking fits beside what all routers promised, as the shared ledger decides."""
    id = lease.replica.id
    promised = sum(front.fleet.promises().get(id, Promise()).kv_tokens for front in ledger)
    return promised <= lease.reserve_limit_tokens


def exchange(front: Front, fronts: Sequence[Front], now_s: float) -> None:
    """Let the other routers know what one has promised, and what happened to conversations there."""
    front.is_dirty = False
    news = front.router.news()
    promises = front.fleet.promises()
    changed = {id: promise for id, promise in promises.items() if promise != front.published.get(id)}
    gone = front.published.keys() - promises.keys()
    for other in fronts:
        if other is front:
            continue
        for id in gone:
            other.others.pop(id, None)
        for id, promise in changed.items():
            other.others[id] = plus(other.others.get(id), promise, front.published.get(id))
        other.fleet.set_others(other.others)
        other.router.hear(news, now_s)
    front.published = promises


def plus(old: Promise | None, new: Promise, less: Promise | None) -> Promise:
    """Return a sum in which one part was replaced."""
    old, less = old or Promise(), less or Promise()
    return Promise(
        old.requests + new.requests - less.requests,
        old.prefill_tokens + new.prefill_tokens - less.prefill_tokens,
        old.kv_tokens + new.kv_tokens - less.kv_tokens,
    )
