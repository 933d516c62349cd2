"""What routers tell each other of conversations: late, lost, doubled, and none of it does harm."""

from __future__ import annotations

from random import Random

from kvroute.routing.admission import ELSEWHERE_S, AdmissionSettings
from kvroute.routing.demand import Outcome, Usage
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, fleet_of


def router(name: str) -> Router:
    return Router(fleet_of("r0"), rng=Random(name), admission=AdmissionSettings())


def live(one: Router) -> tuple[int, int]:
    """Return how many conversations live, and how many have a turn under way."""
    rows = one.admission.standing().live
    return (rows[0].conversations, rows[0].under_way) if rows else (0, 0)


def begun(one: Router, blocks: int, now: float = 1.0):
    return one.admit(ask(16 * blocks, chain=chain(blocks)), {}, now)


def test_a_turn_is_heard_to_begin_and_to_end():
    """Each event is told once, and leaves the other router with the same seats."""
    a, b = router("a"), router("b")
    lease = begun(a, 20)
    b.hear(a.news(), 1.0)
    assert live(b) == (1, 1)
    assert a.news() == []
    lease.finish(Outcome.DONE, 2.0, Usage(320, 100, 0))
    b.hear(a.news(), 2.0)
    assert live(b) == (1, 0)


def test_a_turn_goes_on_elsewhere_before_the_end_of_the_last_was_heard():
    """Who asks again at once may reach a router that still takes the answer to be under way: it is no branch."""
    a, b = router("a"), router("b")
    lease = begun(a, 20)
    b.hear(a.news(), 1.0)
    lease.finish(Outcome.DONE, 2.0, Usage(320, 100, 0))
    begun(b, 30, 2.0)
    assert live(b) == (1, 1)
    b.hear(a.news(), 2.1)
    assert live(b) == (1, 1)
    a.hear(b.news(), 2.1)
    assert live(a) == (1, 1)


def test_what_comes_twice_or_late_changes_nothing():
    """A conversation never goes back to an earlier turn."""
    a, b = router("a"), router("b")
    lease = begun(a, 20)
    first = a.news()
    lease.finish(Outcome.DONE, 2.0, Usage(320, 100, 0))
    begun(a, 30, 3.0)
    b.hear(a.news(), 3.0)
    b.hear([*first, *first], 3.0)
    assert live(b) == (1, 1)
    assert b.admission.standing().live[0].now_tokens >= 480


def test_an_end_that_is_never_heard_comes_by_itself():
    """A router that died takes no seat with it for good."""
    a, b = router("a"), router("b")
    begun(a, 20)
    b.hear(a.news(), 1.0)
    b.hear([], 1.0 + ELSEWHERE_S)
    assert live(b)[1] == 0
    b.hear([], 1.0 + 2 * ELSEWHERE_S)
    assert live(b) == (0, 0)


def test_a_router_alone_keeps_nothing_to_tell():
    """Once it has a peer, what happens from then on is told: a turn says all that is known of its conversation."""
    a, b = router("a"), router("b")
    a.set_alone(True)
    lease = begun(a, 20)
    lease.finish(Outcome.DONE, 2.0, Usage(320, 100, 0))
    assert a.news() == []
    a.set_alone(False)
    begun(a, 30, 3.0)
    b.hear(a.news(), 3.0)
    assert live(b) == (1, 1)
