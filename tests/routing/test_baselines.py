"""The usual policies, selectable by name."""

from __future__ import annotations

from collections import Counter

import pytest

from kvroute.errors import ConfigError
from kvroute.routing.demand import Outcome
from kvroute.routing.router import POLICIES
from tests.routing.builders import ask, chain, hits, ids, replica, router_of


def placed(router: object, count: int, model: str = "m") -> list[str]:
    return [router.place(ask(100, model), hits(r0=90), now=0.0).replica.id for _ in range(count)]


def test_round_robin_is_strictly_cyclic():
    """Requests go to the replicas in the order of joining, again and again, whatever is cached."""
    assert placed(router_of("r0", "r1", "r2", policy="round-robin"), 7) == "r0 r1 r2 r0 r1 r2 r0".split()


def test_round_robin_turns_for_each_model_alone():
    """Alternating models do not fall into step with the replicas."""
    router = router_of(replica("r0", "a", "b"), replica("r1", "a", "b"), policy="round-robin")
    turns = [router.place(ask(9, model), {}, now=0.0).replica.id for model in "abab"]
    assert turns == "r0 r0 r1 r1".split()


def test_round_robin_goes_on_behind_a_replica_that_left():
    """The turn passes on to the next one where the last chosen is gone."""
    router = router_of("r0", "r1", "r2", policy="round-robin")
    placed(router, 2)
    router.fleet.leave(next(ids("r1")))
    assert placed(router, 3) == "r2 r0 r2".split()


def test_least_request_levels_what_is_in_flight():
    """Each request goes where the fewest are."""
    router = router_of("r0", "r1", "r2", policy="least-request")
    leases = [router.place(ask(100), {}, now=0.0) for _ in range(6)]
    assert Counter(lease.replica.id for lease in leases) == {"r0": 2, "r1": 2, "r2": 2}
    leases[1].finish(Outcome.DONE, 1.0)
    assert placed(router, 1) == [leases[1].replica.id]


def test_power_of_two_never_picks_the_fullest():
    """Of two that chance picks the emptier wins, so the replica with most in flight gets nothing."""
    router = router_of("r0", "r1", "r2", policy="power-of-two")
    full = [router.place(ask(100), {}, now=0.0, avoid=set(ids("r1 r2"))) for _ in range(50)]
    assert len(full) == 50
    assert "r0" not in placed(router, 40)


def test_random_reaches_all_evenly_and_can_be_repeated():
    """Chance is handed in: the same seed gives the same placements."""
    one, two = (placed(router_of("r0", "r1", "r2", policy="random"), 300) for _ in range(2))
    assert one == two
    assert min(Counter(one).values()) > 70


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_filters_books_and_explains(policy: str):
    """Health, drain and avoided replicas hold for all policies, and each says what its choice costs."""
    router = router_of("r0", "r1", "r2", "r3", policy=policy)
    r0, r1, r2, r3 = ids("r0 r1 r2 r3")
    router.fleet.set_health(r0, False)
    router.fleet.set_draining(r1, True)
    lease = router.place(ask(100), {}, now=0.0, avoid={r2})
    assert (lease.replica.id, lease.placement.policy) == (r3, policy)
    assert lease.placement.cost_s == pytest.approx(sum(lease.placement.terms.values()))
    assert router.fleet.promises()[r3].requests == 1


def test_an_unknown_policy_names_the_choices():
    """A wrong name is refused with the valid ones."""
    with pytest.raises(ConfigError, match="kvroute, round-robin, random, least-request, power-of-two"):
        router_of("r0", policy="roundrobin")


def test_consistent_hash_sends_equal_beginnings_to_one_replica():
    """Prompts with the same first 1,024 tokens share a replica; different ones spread over all."""
    router = router_of("r0", "r1", "r2", policy="consistent-hash")
    found = Counter()
    for root in range(300):
        same = set()
        for more in (0, 10):
            with router.place(ask(2_000, chain=chain(125 + more, root=root)), {}, 0.0) as lease:
                same.add(lease.replica.id)
        found[same.pop()] += 1
        assert not same
    assert min(found.values()) > 60


def test_consistent_hash_bounds_the_load():
    """No replica takes more than a quarter over the mean: of 30 equal prompts at once at most 1.25 x 30 / 3 + 1."""
    router = router_of("r0", "r1", "r2", policy="consistent-hash")
    found = Counter(router.place(ask(2_000, chain=chain(125)), {}, 0.0).replica.id for _ in range(30))
    assert max(found.values()) <= 13
    assert len(found) == 3
