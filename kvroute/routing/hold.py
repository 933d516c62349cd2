"""A request that is kept at the router until memory fits."""

from __future__ import annotations

from msgspec import Struct

from kvroute.routing.demand import Demand


class Hold(Struct, frozen=True, eq=False):
    """A ticket: the driver keeps it with the request and hands it back when the request is admitted or dropped."""

    number: int  # of its router, in the order of arrival
    demand: Demand
    since_s: float
    until_s: float  # when it ends at the latest, whatever happens
    reason: str  # in a few words
