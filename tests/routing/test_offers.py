"""Prices of one request on several replicas."""

from __future__ import annotations

from kvroute.routing.cost import Slo
from kvroute.routing.demand import Promise
from kvroute.routing.offers import NOT_MET_S, Offers, cheapest, tied_of
from tests.routing.builders import ask, fleet_of, hits, replica


def test_a_replica_that_holds_more_costs_less():
    """Hits shorten the prefill, and one token is always computed."""
    members = fleet_of("r0", "r1").serving("m")
    offers = Offers(ask(1_000), hits(r1=1_000), {}, 100.0, 1.0)
    assert offers.work(members[1]).hit_tokens == 999
    assert offers.costs(members)[1] < offers.costs(members)[0]
    assert cheapest(members, offers.costs(members), ask(1_000)) is members[1]


def test_what_lies_on_a_slower_tier_is_brought_back():
    """Tokens beyond the fast tier are hits that have to be copied."""
    (member,) = fleet_of("r0").serving("m")
    work = Offers(ask(1_000), hits(r0=200), hits(r0=700), 100.0, 1.0).work(member)
    assert (work.hit_tokens, work.copy_tokens, work.miss_tokens) == (700, 500, 300)


def test_costs_that_differ_by_little_are_equal():
    """A hundredth of the whole prefill decides nothing."""
    members = fleet_of("r0", "r1").serving("m")
    assert len(tied_of(members, [1.0, 1.0 + 0.009], ask(1_000))) == 2
    assert len(tied_of(members, [1.0, 1.0 + 0.02], ask(1_000))) == 1


def test_replicas_that_miss_an_slo_come_after_all_that_meet_it():
    """Whatever they cost: goodput comes first."""
    fleet = fleet_of(replica("r0"), replica("r1"))
    fleet.set_others({replica("r0").id: Promise(1, 5_000, 5_000)})
    members = fleet.serving("m")
    chances = Offers(ask(100), {}, {}, 10.0, 0.8).chances(members, Slo(1.0, 1.0))
    assert chances.costs_s[0] > NOT_MET_S > chances.costs_s[1]
