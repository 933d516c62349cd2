"""Who takes more than its share, told on few tenants."""

from __future__ import annotations

from math import e

import pytest

from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Outcome, Usage
from kvroute.routing.fairness import TENANTS_MAX, WINDOW_S, Fairness
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, hits, replica, router_of


def taken(**tokens: float) -> Fairness:
    """Make tenants that took so many tokens."""
    fairness = Fairness()
    for tenant in tokens:
        fairness.ask(tenant)
    for tenant, count in tokens.items():
        fairness.take(tenant, count)
    return fairness


def greedy(fairness: Fairness, names: str) -> str:
    return "".join(name for name in names if fairness.is_greedy(name))


def test_who_takes_most_of_all_leaves_room_for_the_others():
    """Two that take alike, or nearly, leave nothing; neither does one alone, nor a stranger."""
    assert greedy(taken(a=9, b=1), "ab") == "a"
    assert greedy(taken(a=2, b=1), "ab") == ""
    assert greedy(taken(a=5, b=1, c=1, d=1), "abcd") == "a"
    assert greedy(taken(a=9), "ab") == ""


ANSWER_S = 20.0


def learn(fairness: Fairness, tenant: str, kv_tokens: float) -> None:
    fairness.learn(tenant, kv_tokens, peak_tokens=3 * kv_tokens, first_token_s=0.2, answer_s=ANSWER_S)


def test_what_the_others_usually_ask_is_left_to_them():
    """The greedy one's own requests do not count."""
    fairness = taken(a=9, b=1)
    learn(fairness, "b", 100.0)
    learn(fairness, "a", 9_000.0)
    reserve = fairness.reserve("a")
    assert reserve is not None
    assert (reserve.room_tokens, reserve.peak_tokens, reserve.first_token_s) == (100.0, 300.0, 0.2)
    assert fairness.reserve("b") is None


def test_what_they_found_no_room_for_is_left_free_for_a_while():
    """On two replicas half of it each; a greedy one's own waiting does not count."""
    fairness = taken(a=90_000, b=1)
    fairness.replicas = 2
    learn(fairness, "b", 100.0)
    for tenant, tokens in (("b", 500.0), ("b", 300.0), ("a", 9_000.0)):
        fairness.wait(tenant, tokens)
    reserve = fairness.reserve("a")
    assert reserve is not None
    assert reserve.room_tokens == 400.0
    fairness.advance(ANSWER_S)
    fairness.reserve("a")
    assert reserve.room_tokens == pytest.approx(400 / e)
    fairness.advance(5 * ANSWER_S)
    fairness.reserve("a")
    assert reserve.room_tokens == 100.0


def test_who_has_gone_is_forgotten_and_so_is_what_was_taken_long_ago():
    """After a while alone nothing is left free; what was taken before counts less than what is taken now."""
    fairness = taken(a=9, b=1)
    fairness.advance(WINDOW_S + 1)
    fairness.ask("a")
    assert greedy(fairness, "ab") == ""
    fairness = taken(a=900, b=100)
    for step in range(1, 200):
        fairness.advance(step * WINDOW_S / 2)
        for tenant in "ab":
            fairness.ask(tenant)
        fairness.take("b", 500.0)
    assert greedy(fairness, "ab") == "b"


def test_tenants_are_bounded():
    """Names that come and go do not pile up."""
    fairness = Fairness()
    for number in range(TENANTS_MAX + 10):
        fairness.ask(f"t{number}")
        fairness.take(f"t{number}", 1.0)
    assert len(fairness._taken) == TENANTS_MAX
    assert round(fairness._total) == TENANTS_MAX


def pool_of_two_tenants() -> Router:
    """Make a replica of 10,000 tokens where "much" has taken all, and "few" asks now and then."""
    router = router_of(replica("r0", capacity_tokens=10_000), admission=AdmissionSettings())
    for number in range(4):
        done(router, placed(router, number, 3_000, "much"))
    done(router, placed(router, 9, 1_000, "few"))
    return router


def asked(router: Router, root: int, tokens: int, tenant: str) -> Lease | Hold:
    return router.admit(ask(tokens, chain=chain(tokens // 16, root=root), tenant=tenant), {}, 0.0)


def placed(router: Router, root: int, tokens: int, tenant: str) -> Lease:
    lease = asked(router, root, tokens, tenant)
    assert isinstance(lease, Lease)
    return lease


def done(router: Router, lease: Lease) -> None:
    lease.finish(Outcome.DONE, 0.0, Usage(lease.placement.miss_tokens, 100, 0))


def test_what_can_be_overtaken_waits_here_and_not_at_the_engine():
    """The engine has a prompt of much's to compute: its next one comes after few's, though it came before."""
    router = pool_of_two_tenants()
    first = placed(router, 20, 2_000, "much")
    hold = asked(router, 21, 1_000, "much")
    assert isinstance(hold, Hold)
    assert isinstance(asked(router, 22, 1_000, "few"), Lease)
    first.began(1.0)
    assert list(router.released(1.0)) == []  # few's prompt is to be computed now


def test_one_tenant_alone_leaves_nothing():
    """Without others the engine's queue is as good as ours."""
    router = router_of(replica("r0", capacity_tokens=10_000), admission=AdmissionSettings())
    for number in range(3):
        placed(router, number, 1_000, "much")


def test_a_request_counts_when_it_goes_and_cached_tokens_a_tenth():
    """What was expected is put right when the answer has come."""
    router = router_of(replica("r0"), admission=AdmissionSettings())
    admission = router.admission
    assert admission is not None
    demand = ask(2_000, chain=chain(125), tenant="a")
    lease = router.admit(demand, hits(r0=1_600), 0.0)
    assert isinstance(lease, Lease)
    assert admission._served.of("a") == 400 + 100 + 160
    lease.finish(Outcome.DONE, 1.0, Usage(2_000, 30, 1_000))
    assert admission._served.of("a") == 1_000 + 30 + 100
