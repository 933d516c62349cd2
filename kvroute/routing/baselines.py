"""The usual ways to choose, by name: to compare with, to fall back to, and to shadow.

A policy takes the members that may serve a request, in the order of joining, and returns one. None of these looks at
caches. "kvroute" itself, the cheapest by cost, is in `router`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from random import Random

from kvroute.routing.demand import Demand
from kvroute.routing.member import Member

MODELS_MAX = 1024

Policy = Callable[[Sequence[Member], Demand, Random], Member]


class RoundRobin:
    """Strictly in turn, for each model: the first that joined after the one chosen last, else the first of all."""

    def __init__(self) -> None:
        self._last: OrderedDict[str, int] = OrderedDict()

    def __call__(self, members: Sequence[Member], demand: Demand, rng: Random) -> Member:
        last = self._last.pop(demand.model, -1)
        chosen = next((member for member in members if member.number > last), members[0])
        self._last[demand.model] = chosen.number
        if len(self._last) > MODELS_MAX:
            self._last.popitem(last=False)
        return chosen


def random_choice(members: Sequence[Member], demand: Demand, rng: Random) -> Member:
    """Any, with equal chances."""
    return rng.choice(members)


def least_request(members: Sequence[Member], demand: Demand, rng: Random) -> Member:
    """The fewest in flight, ties in turn (HAProxy's leastconn)."""
    return min(members, key=lambda member: (member.view.sequences, member.last_chosen))


def power_of_two(members: Sequence[Member], demand: Demand, rng: Random) -> Member:
    """The one with fewer in flight of two that chance picks (Mitzenmacher, 2001; Envoy's least request)."""
    pair = members if len(members) < 3 else rng.sample(members, 2)
    return min(pair, key=lambda member: (member.view.sequences, member.last_chosen))


BASELINES: dict[str, Callable[[], Policy]] = {
    "round-robin": RoundRobin,
    "random": lambda: random_choice,
    "least-request": lambda: least_request,
    "power-of-two": lambda: power_of_two,
}
