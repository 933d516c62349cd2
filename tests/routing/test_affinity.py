"""Affinity with a fixed number of live conversations a replica."""

from __future__ import annotations

import pytest

from kvroute.errors import ConfigError
from kvroute.routing.affinity import MEMORY_S
from kvroute.routing.demand import Demand, Outcome, Usage
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, router_of


def turn(root: int, blocks: int = 20) -> Demand:
    return ask(blocks * 16, chain=chain(blocks, root=root))


def booked(router: Router, demand: Demand, now: float = 0.0, hold: Hold | None = None) -> Lease:
    lease = router.admit(demand, {}, now, hold=hold)
    assert isinstance(lease, Lease)
    return lease


def test_a_conversation_stays_where_it_began_and_new_ones_spread():
    """Four conversations live two by two, and go on where they live though nothing is known of caches."""
    router = router_of("r0", "r1", policy="affinity:2")
    homes = {}
    for root in range(4):
        lease = booked(router, turn(root))
        homes[root] = lease.replica.id
        lease.finish(Outcome.DONE, 0.5, Usage(320, 10))
    assert sorted(homes.values()) == ["r0", "r0", "r1", "r1"]
    assert {root: booked(router, turn(root, 30), 1.0).replica.id for root in range(4)} == homes


def test_a_new_one_waits_until_another_has_been_silent():
    """The third on a replica for two goes when one of the two was silent for its time."""
    router = router_of("r0", policy="affinity:2")
    first = booked(router, turn(1))
    booked(router, turn(2))
    hold = router.admit(turn(3), {}, 0.0)
    assert isinstance(hold, Hold)
    first.finish(Outcome.DONE, 1.0, Usage(320, 10))
    assert list(router.released(1.0 + MEMORY_S - 0.1)) == []
    assert list(router.released(1.0 + MEMORY_S)) == [hold]
    booked(router, hold.demand, 1.0 + MEMORY_S, hold)


def test_without_a_number_nobody_waits():
    """Plain affinity takes all."""
    router = router_of("r0", policy="affinity")
    assert all(booked(router, turn(root)) for root in range(50))


@pytest.mark.parametrize("policy", ["affinity:0", "affinity:x", "affinity:", "affinity:-1"])
def test_a_number_that_is_none_is_refused(policy: str):
    """The message says what is expected."""
    with pytest.raises(ConfigError, match=r"after affinity: comes the number|is none of"):
        router_of("r0", policy=policy)
