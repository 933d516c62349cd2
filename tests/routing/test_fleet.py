"""The fleet: one owner of what is known about all replicas."""

from __future__ import annotations

from random import Random

import pytest
from msgspec.structs import replace

from kvroute.errors import ConfigError, NoReplica
from kvroute.routing.demand import Outcome, Promise, Usage
from kvroute.routing.fleet import REPLICAS_MAX, Fleet, base_of
from kvroute.routing.lease import Lease
from kvroute.routing.replica import Load, ModelCard
from tests.routing.builders import ask, fleet_of, hits, ids, replica, router_of

R0, R1 = ids("r0 r1")


def test_the_fleet_describes_itself():
    """The repr says at a glance what runs where and who is out."""
    router = router_of("r0", "r1")
    router.fleet.set_draining(R1, True)
    for _ in range(2):
        router.place(ask(100), {}, now=0.0).began(1.0)
    router.place(ask(500), hits(r0=16), now=1.0)
    assert repr(router.fleet) == "<Fleet r0: 2 running, 31 blocks pending | r1: draining>"


def test_an_empty_fleet_says_so():
    """Nothing to see is said, not shown as nothing."""
    assert repr(Fleet()) == "<Fleet empty>"


def test_a_draining_replica_shows_what_still_runs():
    """Whoever waits for a drain sees when it is over, and an ill replica shows why it is out."""
    router = router_of("r0")
    lease = router.place(ask(100), {}, now=0.0)
    router.fleet.set_draining(R0, True)
    lease.began(1.0)
    assert repr(router.fleet) == "<Fleet r0: draining, 1 running, 0 blocks pending>"
    lease.finish(Outcome.FAILED, 2.0)
    router.fleet.set_health(R0, False)
    assert repr(router.fleet) == "<Fleet r0: unhealthy, draining, 1 failed>"


def test_joining_again_is_an_update():
    """A replica that says more about itself later keeps its leases, its health and its place."""
    router = router_of("r0", "r1")
    router.place(ask(100), {}, now=0.0)
    router.fleet.set_health(R0, False)
    router.fleet.join(replica("r0", "m", "lora", capacity_tokens=5), now=1.0)
    assert [each.id for each in router.fleet.replicas()] == ["r0", "r1"]
    assert router.fleet.promises()[R0].requests == 1
    assert not router.fleet.states()[0].is_healthy
    assert router.fleet.models() == ("m", "lora")


def test_a_replica_that_left_is_forgotten_at_once():
    """What left gets nothing more, its models go with it, and a later replica of that id starts anew."""
    router = router_of(replica("r0", "a"), replica("r1", "b"))
    lease = router.place(ask(100, "a"), {}, now=0.0)
    router.fleet.leave(R0)
    assert router.fleet.models() == ("b",)
    router.fleet.join(replica("r0", "a"), now=1.0)
    lease.finish(Outcome.FAILED, 2.0)
    assert router.fleet.promises()[R0] == Promise()
    assert router.fleet.states()[1].failures == 0


def test_what_is_said_about_strangers_is_ignored():
    """Feeds may be late: reports about a replica that left change nothing."""
    fleet = fleet_of("r0")
    fleet.report(R1, Load(running=9), 0.0)
    fleet.set_health(R1, False)
    fleet.set_draining(R1, True)
    fleet.update(replica("r1"))
    fleet.leave(R1)
    fleet.set_others({R1: Promise(1, 1, 1)})
    assert repr(fleet) == "<Fleet r0: 0 running, 0 blocks pending>"


def test_a_health_check_forgives_failures():
    """A replica that failed requests in a row is out until a check says that it is well."""
    router = router_of("r0")
    for _ in range(3):
        router.place(ask(10), {}, now=0.0).finish(Outcome.FAILED, 1.0)
    with pytest.raises(NoReplica, match="r0: failing"):
        router.place(ask(10), {}, now=1.0)
    assert router.fleet.is_failing(R0)
    router.fleet.set_health(R0, True)
    assert router.place(ask(10), {}, now=1.0).replica.id == R0
    assert not router.fleet.is_failing(R0)


def test_others_promises_are_replaced_not_added():
    """The ledger gives absolute figures; a replica that is absent has none."""
    fleet = fleet_of("r0", "r1")
    fleet.set_others({R0: Promise(1, 10, 100), R1: Promise(2, 20, 200)})
    fleet.set_others({R0: Promise(3, 30, 300)})
    assert [state.others for state in fleet.states()] == [Promise(3, 30, 300), Promise()]
    assert fleet.promises() == {R0: Promise(), R1: Promise()}


def test_the_fleet_is_bounded():
    """A discovery that runs wild is refused with the limit."""
    fleet = Fleet()
    for number in range(REPLICAS_MAX):
        fleet.join(replica(f"r{number}", f"m{number}"), 0.0)
    with pytest.raises(ConfigError, match=str(REPLICAS_MAX)):
        fleet.join(replica("more"), 0.0)


@pytest.mark.parametrize(
    ("cards", "base"),
    [
        ((ModelCard("m"), ModelCard("lora", parent="m")), "m"),
        ((ModelCard("lora", parent="m"),), "m"),
        ((), ""),
    ],
)
def test_speed_belongs_to_the_base_model(cards: tuple[ModelCard, ...], base: str):
    """Adapters run at their base model's speed."""
    assert base_of(replace(replica("r0"), cards=cards)) == base


@pytest.mark.parametrize("seed", range(5))
def test_promises_are_the_sum_of_open_leases(seed: int):
    """Through a thousand random events the ledger is what the open leases owe, for each replica, and ends at zero."""
    chance, router, names = Random(seed), router_of("r0", "r1", "r2", "r3"), list(ids("r0 r1 r2 r3"))
    placed: list[Lease] = []
    begun: set[Lease] = set()
    for step in range(1_000):
        event = chance.choice(["place", "place", "place", "begin", "finish", "finish", "drain", "up", "others"])
        if event == "place" and any(state.is_available for state in router.fleet.states()):
            held = {chance.choice(names): chance.randrange(4_000)}
            demand = ask(chance.randrange(1, 4_000), sequences=chance.randrange(1, 4))
            placed.append(router.place(demand, held, float(step)))
        elif event == "begin" and placed:
            lease = chance.choice(placed)
            lease.began(float(step))
            begun.add(lease)
        elif event == "finish" and placed:
            lease = placed.pop(chance.randrange(len(placed)))
            lease.finish(chance.choice(list(Outcome)), float(step), chance.choice([None, Usage(100, 1_000, 50)]))
        elif event == "drain":
            router.fleet.set_draining(chance.choice(names), chance.random() < 0.3)
        elif event == "up":
            router.fleet.set_health(chance.choice(names), True)
        else:
            router.fleet.set_others({chance.choice(names): Promise(1, chance.randrange(9_000), 9_000)})
        owed = {name: Promise() for name in names}
        for lease in placed:
            owed[lease.replica.id] += owes(lease, lease in begun)
        assert router.fleet.promises() == owed
    for lease in placed:
        lease.refuse(1e4)
    assert set(router.fleet.promises().values()) == {Promise()}


def owes(lease: Lease, has_begun: bool) -> Promise:
    tokens = lease.placement.hit_tokens + lease.placement.miss_tokens + lease._work.sequences * 100
    return Promise(1, 0 if has_begun else lease.placement.miss_tokens, tokens)
