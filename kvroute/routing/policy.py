"""What every way to choose sees of one request, and what it returns.

A policy takes the members that may serve a request, in the order of joining, and returns one of them. It books nothing.
Which knowledge of caches it is given is a setting: what the index knows of every engine ("exact"), or only what the
rule had where it comes from ("original"), which for most is a record of what it placed itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Literal

from msgspec import Struct

from kvroute.routing.demand import Demand
from kvroute.routing.member import Member
from kvroute.routing.replica import ReplicaId

Knowledge = Literal["exact", "original"]


class Case(Struct, frozen=True):
    """One request, as a policy sees it."""

    demand: Demand
    hits: Mapping[ReplicaId, int]  # prompt tokens that each replica need not compute, as the index knows; absent: none
    now_s: float
    rng: Random


Policy = Callable[[Sequence[Member], Case], Member]
MakePolicy = Callable[[Knowledge], Policy]
