"""Policies beside the one that is followed: asked about the same requests, priced alike, without any say."""

from __future__ import annotations

from random import Random

import pytest

from kvroute.errors import ConfigError
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.policy import Case
from kvroute.routing.router import POLICIES
from kvroute.routing.shadow import LOOKS, Shadows
from tests.routing.builders import ask, chain, fleet_of, hits, replica, router_of


def placements(router, count: int = 12) -> list[str]:
    """Place requests of which `a` holds most, each of which ends before the next comes."""
    chosen = []
    for at in range(count):
        lease = router.place(ask(1000, chain=chain(62)), hits(a=900), float(at))
        chosen.append(lease.replica.id)
        lease.refuse(float(at))
    return chosen


def test_a_shadow_is_counted_against_what_was_followed():
    """Round robin would have gone to the warm replica every third time, and computed the prompt elsewhere."""
    router = router_of("a", "b", "c", shadows=["round-robin"])
    assert placements(router) == ["a"] * 12
    (tally,) = router.shadows.tallies
    assert (tally.policy, tally.placements, tally.same) == ("round-robin", 12, 4)
    assert tally.placed == {"a": 4, "b": 4, "c": 4}
    assert (tally.hit_tokens, tally.our_hit_tokens, tally.prompt_tokens) == (4 * 900, 12 * 900, 12 * 1000)
    assert tally.cost_s - tally.our_cost_s == pytest.approx(8 * 0.9, rel=0.2)  # 900 tokens at 1 ms


def test_the_same_policy_agrees_with_itself():
    """kvroute's own choice can be a shadow as well; beside itself it never differs, beside another it costs less."""
    beside_itself = router_of("a", "b", shadows=["kvroute"])
    placements(beside_itself)
    (tally,) = beside_itself.shadows.tallies
    assert tally.same == tally.placements == 12
    assert tally.cost_s == tally.our_cost_s
    other = router_of("a", "b", policy="round-robin", shadows=["kvroute"])
    placements(other)
    (tally,) = other.shadows.tallies
    assert tally.cost_s < tally.our_cost_s


def test_what_is_held_is_asked_about_when_it_goes():
    """A held request counts once, at the moment in which it is bound."""
    router = router_of(
        replica("a", capacity_tokens=10_000), admission=AdmissionSettings(), shadows=["least-request", "lmetric"]
    )
    first, second = (router.admit(ask(8000, chain=chain(500, root=root)), {}, 0.0) for root in (1, 2))
    assert isinstance(second, Hold)
    assert [tally.placements for tally in router.shadows.tallies] == [1, 1]
    first.refuse(1.0)
    (hold,) = router.released(1.0)
    assert isinstance(router.admit(hold.demand, {}, 1.0, hold=hold), Lease)
    assert [tally.placements for tally in router.shadows.tallies] == [2, 2]


@pytest.mark.parametrize("policy", POLICIES)
def test_no_shadow_changes_where_requests_go(policy):
    """With any shadow, the same requests go to the same replicas, by chance's choices too."""
    for followed in ("kvroute", "power-of-two"):
        assert placements(router_of("a", "b", "c", policy=followed, shadows=[policy])) == placements(
            router_of("a", "b", "c", policy=followed)
        )


def test_a_shadow_that_fails_is_counted_and_changes_nothing():
    """Its exception ends with it; the next shadow is asked all the same."""

    def broken(members, case):
        raise ZeroDivisionError

    fleet = fleet_of("a", "b")
    members = fleet.serving("m")
    shadows = Shadows({"broken": broken, "first": lambda members, case: members[0]})
    router = router_of("a", "b")
    chosen = router.place(ask(100), {}, 0.0).placement

    def price(member):
        return router.explain(ask(100), {}, 0.0)[0].placement

    shadows.observe(members, Case(ask(100), hits(), 0.0, Random(0)), chosen, price)
    assert [(tally.failures, tally.placements) for tally in shadows.tallies] == [(1, 0), (0, 1)]


def test_the_work_is_bounded_in_large_pools():
    """With ten times as many members as LOOKS, every tenth placement is shown, and none costs more than the others."""
    router = router_of(*(f"r{n}" for n in range(LOOKS * 10)), shadows=["least-request"])
    for at in range(50):
        router.place(ask(100), {}, float(at))
    assert router.shadows.tallies[0].placements == pytest.approx(5, abs=1)


@pytest.mark.parametrize(
    ("names", "words"), [(["fastest"], "routing.shadow: 'fastest'"), (["random"] * 5, "at most 4")]
)
def test_refused(names, words):
    """Names that do not exist, and too many of them, are refused."""
    with pytest.raises(ConfigError, match=words):
        router_of("a", shadows=names)
