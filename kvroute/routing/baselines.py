"""The usual ways to choose, by name: to compare with, to fall back to, and to shadow.

Those here do not look at caches; those that do are in `cached`. "kvroute" itself, the cheapest by cost, is in `router`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from kvroute.kv.chain import HASH_BYTES
from kvroute.routing.cached import CACHED, make_blend, weights_of
from kvroute.routing.demand import Demand
from kvroute.routing.member import Member
from kvroute.routing.policy import Case, MakePolicy

MODELS_MAX = 1024
KEY_TOKENS = 1024  # of a prompt's beginning, that name its place on the ring
LOAD_FACTOR_DEFAULT = 1.25  # KubeAI: meanLoadPercentage 125
POINTS_DEFAULT = 256  # KubeAI: replication


class RoundRobin:
    """Strictly in turn, for each model: the first that joined after the one chosen last, else the first of all."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def __call__(self, members: Sequence[Member], case: Case) -> Member:
        model = case.demand.model
        last = self._last.pop(model, -1)
        chosen = next((member for member in members if member.number > last), members[0])
        self._last[model] = chosen.number
        if len(self._last) > MODELS_MAX:
            self._last.popitem(last=False)
        return chosen


def random_choice(members: Sequence[Member], case: Case) -> Member:
    """Any, with equal chances."""
    return case.rng.choice(members)


def least_request(members: Sequence[Member], case: Case) -> Member:
    """The fewest in flight, ties in turn (HAProxy's leastconn)."""
    return min(members, key=lambda member: (member.view.sequences, member.last_chosen))


def power_of_two(members: Sequence[Member], case: Case) -> Member:
    """The one with fewer in flight of two that chance picks (Mitzenmacher, 2001; Envoy's least request)."""
    pair = members if len(members) < 3 else case.rng.sample(members, 2)
    return min(pair, key=lambda member: (member.view.sequences, member.last_chosen))


class ConsistentHash:
    """The first replica on a ring, from the prompt's beginning on, that is at most a quarter over the mean load.

    Source: Mirrokni, Thorup, Zadimoghaddam, "Consistent hashing with bounded loads" (2016), as KubeAI's PrefixHash has
    it. Its key is the adapter and the first 100 characters of the first user message; ours the first 1,024 tokens.
    """

    def __init__(self) -> None:
        self._ids: tuple[str, ...] = ()
        self._ring: list[tuple[int, int]] = []  # point, place of its replica among `_ids`

    def __call__(self, members: Sequence[Member], case: Case) -> Member:
        ids = tuple(member.replica.id for member in members)
        if ids != self._ids:
            points = (
                (xxh3_64_intdigest(f"{id}#{n}".encode()), at)
                for at, id in enumerate(ids)
                for n in range(POINTS_DEFAULT)
            )
            self._ids, self._ring = ids, sorted(points)
        limit = LOAD_FACTOR_DEFAULT * (sum(member.view.sequences for member in members) + 1) / len(members)
        start = bisect_left(self._ring, (key_of(case.demand), 0))
        for step in range(len(self._ring)):
            member = members[self._ring[(start + step) % len(self._ring)][1]]
            if member.view.sequences + 1 <= max(limit, 1.0):
                return member
        return members[self._ring[start % len(self._ring)][1]]


def key_of(demand: Demand) -> int:
    """Return where a prompt lies on the ring: by its first KEY_TOKENS tokens, or by as many whole blocks as it has."""
    blocks = max(KEY_TOKENS // demand.block_size, 1)
    head = demand.chain[: blocks * HASH_BYTES][-HASH_BYTES:]
    return xxh3_64_intdigest(head or demand.model.encode())


BASELINES: dict[str, MakePolicy] = {
    "round-robin": lambda knowledge: RoundRobin(),
    "random": lambda knowledge: random_choice,
    "least-request": lambda knowledge: least_request,
    "power-of-two": lambda knowledge: power_of_two,
    "consistent-hash": lambda knowledge: ConsistentHash(),
    **CACHED,
}


def baseline_of(policy: str) -> MakePolicy | None:
    """Return what makes the baseline of that name, `blend:PREFIX:QUEUE:KV` and `affinity:N` included; None = none.

    Raises:
        ConfigError: its figures cannot be read.
    """
    weights = weights_of(policy)
    return make_blend(weights) if weights is not None else BASELINES.get(policy.partition(":")[0])
