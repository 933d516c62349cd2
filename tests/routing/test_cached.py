"""Published cache-aware rules, on examples computed by hand: 1,000 prefill tokens a second, blocks of 16."""

from __future__ import annotations

from random import Random

import pytest

from kvroute.errors import ConfigError
from kvroute.routing.baselines import BASELINES, baseline_of
from kvroute.routing.cached import SPREAD_DEFAULT
from kvroute.routing.demand import Promise
from kvroute.routing.policy import Case, Knowledge
from kvroute.routing.replica import Load, ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, fleet_of, hits, router_of


def choose(policy: str, tokens: int, seed: int = 0, knowledge: Knowledge = "exact", **others: Promise) -> str:
    """Choose among r0, r1, r2 with what was promised to each; r1 holds `tokens` of the prompt's 1,000."""
    fleet = fleet_of("r0", "r1", "r2")
    fleet.set_others({ReplicaId(name): promise for name, promise in others.items()})
    case = Case(ask(1_000), hits(r1=tokens), 0.0, Random(seed))
    return BASELINES[policy](knowledge)(fleet.serving("m"), case).replica.id


def busy(requests: int = 0, prefill: int = 0, kv: int = 0) -> Promise:
    return Promise(requests, prefill, kv)


def test_threshold_follows_a_match_of_more_than_three_tenths():
    """310 of 1,000 tokens are followed though another replica is idle."""
    assert choose("cache-threshold", 310, r1=busy(60)) == "r1"


def test_threshold_sends_a_short_match_to_the_fewest_in_flight():
    """300 of 1,000 is not more than 0.3."""
    assert choose("cache-threshold", 300, r0=busy(2), r1=busy(1), r2=busy(3)) == "r1"
    assert choose("cache-threshold", 300, r0=busy(1), r1=busy(2), r2=busy(3)) == "r0"


def test_threshold_forgets_all_matches_once_the_pool_is_uneven():
    """A spread of more than 64 requests, and more than 1.5 times, sends everything to the fewest; 64 does not."""
    assert choose("cache-threshold", 900, r0=busy(9), r1=busy(9 + SPREAD_DEFAULT), r2=busy(10)) == "r1"
    assert choose("cache-threshold", 900, r0=busy(9), r1=busy(10 + SPREAD_DEFAULT), r2=busy(10)) == "r0"
    assert choose("cache-threshold", 900, r0=busy(200), r1=busy(265), r2=busy(201)) == "r1"


def test_linear_adds_what_is_to_prefill_and_what_is_active():
    """r0: 1,000 + 100 pending + 0 active = 1,100. r1: 1,000 - 800 + 500 + 399 = 1,099. r2: 1,000 + 0 + 101 = 1,101."""
    state = {"r0": busy(1, 100, 0), "r1": busy(1, 500, 399), "r2": busy(1, 0, 101)}
    assert choose("linear", 800, **state) == "r1"
    assert choose("linear", 798, **state) == "r0"


def test_linear_breaks_ties_by_chance():
    """Equal costs reach every replica, and the same seed gives the same one."""
    assert {choose("linear", 0, seed) for seed in range(20)} == {"r0", "r1", "r2"}
    assert choose("linear", 0, 5) == choose("linear", 0, 5)


def test_lmetric_takes_the_least_product():
    """r0: 1,000 x (0 + 1) = 1,000. r1: (1,000 - 800 + 50) x (3 + 1) = 1,000 as well; a token more of hits decides."""
    state = {"r1": busy(3, 50), "r2": busy(1)}
    assert choose("lmetric", 801, **state) == "r1"
    assert choose("lmetric", 799, **state) == "r0"


def test_blend_weighs_prefix_queue_and_free_cache():
    """3 x 0.5 for the match against 2 x 1 for the shorter queue: r1 needs free KV to win.

    r0: 0 + 2 x 1 + 2 x (1 - kv). r1: 1.5 + 2 x 0 + 2 x 1 = 3.5 with the longest queue; r2 is full and has half of it.
    """
    fleet = fleet_of("r0", "r1", "r2")
    for name, waiting, used in (("r0", 0, 0.2), ("r1", 4, 0.0), ("r2", 2, 1.0)):
        fleet.report(ReplicaId(name), Load(waiting=waiting, kv_used_fraction=used), 0.0)
    case = Case(ask(1_000, chain=chain(62)), {}, 0.0, Random(0))
    policy = BASELINES["blend"]("original")
    assert policy(fleet.serving("m"), case).replica.id == "r0"  # 3.6, 2.0, 1.0
    half = Case(ask(1_000, chain=chain(62)[: 31 * 8]), {}, 0.0, Random(0))
    fleet.report(ReplicaId("r0"), Load(waiting=0, kv_used_fraction=0.3), 0.0)
    policy = BASELINES["blend"]("exact")
    fleet.set_others({ReplicaId("r0"): busy(0, 0, 30_000), ReplicaId("r1"): busy(0, 0, 0)})
    assert policy(fleet.serving("m"), Case(half.demand, hits(r1=500), 0.0, Random(0))).replica.id == "r1"  # 3.4, 5.5


@pytest.mark.parametrize(("policy", "chosen"), [("blend", "r1"), ("blend:1:2:2", "r2"), ("blend:0:1:1", "r2")])
def test_blend_takes_other_weights(policy, chosen):
    """3 x 0.5 for r1's match against 2 x 0.5 for r2's freer cache; at weight 1 it is 0.5, without weight nothing."""
    fleet = fleet_of("r0", "r1", "r2")
    fleet.set_others({ReplicaId(name): busy(0, 0, tokens) for name, tokens in (("r0", 100_000), ("r1", 50_000))})
    make = baseline_of(policy)
    case = Case(ask(1_000), hits(r1=500), 0.0, Random(0))
    assert make("exact")(fleet.serving("m"), case).replica.id == chosen


@pytest.mark.parametrize("text", ["blend:", "blend:1:2", "blend:1:2:x", "blend:-1:2:2", "blend:nan:1:1", "blend:0:0:0"])
def test_weights_that_are_none_are_refused(text):
    """The message says what is wanted."""
    with pytest.raises(ConfigError, match="blend:3:2:2"):
        router_of("r0", policy=text)


def test_sticky_keeps_to_warm_replicas():
    """A replica with 80 % of the prompt is taken though 18 s of prefill are pending there; 79 % is not warm."""
    assert choose("sticky", 800, r1=busy(9, 18_000)) == "r1"
    assert choose("sticky", 799, r1=busy(9, 1), r0=busy(9, 1)) == "r2"


def test_sticky_lets_go_of_saturated_replicas():
    """Over 18 s later than elsewhere, all replicas are open, and the fewest pending tokens decide."""
    assert choose("sticky", 800, r1=busy(9, 18_001), r0=busy(9, 1)) == "r2"
    assert choose("sticky", 800, r1=busy(9, 18_003), r0=busy(9, 2), r2=busy(9, 2)) in {"r0", "r2"}


@pytest.mark.parametrize("policy", ["cache-threshold", "linear", "blend", "sticky", "lmetric"])
def test_a_rule_with_its_original_knowledge_follows_its_own_placements(policy: str):
    """What the index knows does not reach it: the second turn goes where it sent the first."""
    router: Router = router_of("r0", "r1", "r2", policy=policy, knowledge="original")
    first = router.place(ask(1_000, chain=chain(62)), hits(r2=900), 0.0)
    other = ReplicaId("r1" if first.replica.id == "r0" else "r0")
    first.refuse(0.0)
    again = router.place(ask(1_120, chain=chain(70)), {other: 1_110}, 1.0)
    assert again.placement.replica == first.placement.replica
