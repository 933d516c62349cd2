"""A lease gives its place back exactly once, blames only who failed, and learns only from what shows something."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.demand import Outcome, Promise, Usage
from kvroute.routing.member import FAILURES_MAX
from kvroute.routing.replica import ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ROUND, ask, hits, router_of

R0 = ReplicaId("r0")


def promised(router: Router) -> Promise:
    return router.fleet.promises()[R0]


def test_a_lease_holds_prefill_until_the_first_byte_and_kv_until_the_end():
    """Prompt tokens to compute are owed until the answer begins, KV room until it ends."""
    router = router_of("r0")
    lease = router.place(ask(1_000), hits(r0=400), now=0.0)
    assert promised(router) == Promise(1, 600, 1_100)
    lease.began(0.5)
    assert promised(router) == Promise(1, 0, 1_100)
    lease.finish(Outcome.DONE, 1.0)
    assert promised(router) == Promise()


@pytest.mark.parametrize("outcome", list(Outcome))
def test_a_lease_settles_once(outcome: Outcome):
    """Whatever comes after the first settlement changes nothing."""
    router = router_of("r0")
    with router.place(ask(1_000), {}, now=0.0) as lease:
        lease.finish(outcome, 1.0)
        failures = router.fleet.states()[0].failures
        lease.finish(Outcome.FAILED, 2.0)
        lease.began(3.0)
        lease.refuse(3.0)
    assert promised(router) == Promise()
    assert router.fleet.states()[0].failures == failures


def test_leaving_the_block_unfinished_abandons():
    """A cancelled task or a client that left gives the place back and blames nobody."""
    router = router_of("r0")
    with pytest.raises(KeyboardInterrupt), router.place(ask(1_000), {}, now=0.0):
        raise KeyboardInterrupt
    assert promised(router) == Promise()
    assert router.fleet.states()[0].failures == 0


def test_consecutive_failures_take_a_replica_out():
    """So many failed requests in a row make a replica unavailable, one success in between starts anew."""
    router = router_of("r0")
    outcomes = [Outcome.FAILED] * (FAILURES_MAX - 1) + [Outcome.DONE] + [Outcome.FAILED] * FAILURES_MAX
    for outcome in outcomes:
        assert router.fleet.states()[0].is_available
        router.place(ask(10), {}, now=0.0).finish(outcome, 1.0)
    assert not router.fleet.states()[0].is_available


def test_clients_that_leave_never_take_a_replica_out():
    """A hundred abandoned and refused leases leave a replica as well as it was."""
    router = router_of("r0")
    for _ in range(100):
        router.place(ask(10), {}, now=0.0).finish(Outcome.ABANDONED, 1.0)
        router.place(ask(10), {}, now=0.0).refuse(1.0)
    assert router.fleet.states()[0].failures == 0


def test_a_place_is_reserved_in_the_ledger_only_where_it_is_tight():
    """Up to 70 % of promised KV, other routers' included, booking is optimistic; above it the tokens are confirmed."""
    router = router_of("r0")
    assert router.place(ask(1_000), {}, now=0.0).reserve_tokens == 0
    router.fleet.set_others({R0: Promise(9, 0, 68_000)})
    assert router.place(ask(1_000), {}, now=0.0).reserve_tokens == 1_100


def test_usage_teaches_rates():
    """Finished streams of a replica twice as fast as the seed make it known as such."""
    router = router_of("r0")
    for turn in range(60):
        lease = router.place(ask(2_000), {}, now=10.0 * turn)
        lease.began(10.0 * turn + 0.01 + 0.0005 * 2_000)
        lease.finish(Outcome.DONE, 10.0 * turn + 2.0, Usage(2_000, 100, 0))
    learnt = router.fleet.states()[0].rates
    assert learnt.token_s == pytest.approx(0.0005, rel=0.1)
    assert learnt.step_s == pytest.approx((2.0 - 1.01) / 100, rel=0.15)


def test_what_was_cached_counts_as_the_engine_says():
    """A first token is explained by what the engine computed, not by what was predicted."""
    router = router_of("r0")
    for turn in range(60):
        lease = router.place(ask(8_000), {}, now=10.0 * turn)
        lease.began(10.0 * turn + 0.01 + 0.001 * 1_000)
        lease.finish(Outcome.DONE, 10.0 * turn + 2.0, Usage(8_000, 100, 7_000))
    assert router.fleet.states()[0].rates.token_s == pytest.approx(0.001 / 1.25, rel=0.1)


@pytest.mark.parametrize(
    ("streamed", "outcome", "usage"),
    [
        (False, Outcome.DONE, Usage(2_000, 100, 0)),
        (True, Outcome.ABANDONED, Usage(2_000, 100, 0)),
        (True, Outcome.FAILED, Usage(2_000, 100, 0)),
        (True, Outcome.DONE, None),
    ],
)
def test_what_shows_nothing_teaches_no_rates(streamed: bool, outcome: Outcome, usage: Usage | None):
    """Unstreamed answers, abandoned and failed ones, and answers without usage leave the rates as they are."""
    router = router_of("r0")
    for _ in range(20):
        lease = router.place(ask(2_000, streamed=streamed), {}, now=0.0)
        lease.began(50.0)
        lease.finish(outcome, 50.1, usage)
        router.fleet.set_health(R0, True)
    assert router.fleet.states()[0].rates == ROUND


def test_a_request_that_had_to_wait_teaches_no_prefill_rate():
    """Behind a long prompt the first token tells about that one."""
    router = router_of("r0")
    router.place(ask(8_000), {}, now=0.0)
    for _ in range(20):
        lease = router.place(ask(1_000), {}, now=0.0)
        lease.began(9.0)
        lease.finish(Outcome.DONE, 9.0, Usage(1_000, 1, 0))
    assert router.fleet.states()[0].rates.token_s == ROUND.token_s


def test_an_unstreamed_prefill_is_presumed_over():
    """Where the first byte comes with the last, the prefill is owed for half as long again as it should take."""
    router = router_of("r0")
    lease = router.place(ask(1_000, streamed=False), {}, now=0.0)
    router.fleet.advance(1.5)
    assert promised(router).prefill_tokens == 1_000
    router.fleet.advance(1.6)
    assert promised(router).prefill_tokens == 0
    lease.finish(Outcome.DONE, 60.0)
    assert promised(router) == Promise()


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["place", "began", "done", "abandoned", "failed", "refuse", "leave", "join", "advance"]),
        st.integers(0, 30),
    ),
    max_size=80,
)


@given(OPERATIONS)
def test_after_all_leases_are_settled_every_count_is_zero(operations: list[tuple[str, int]]):
    """Whatever happens in whatever order, nothing is lost, counted twice, or negative."""
    router, leases = router_of("r0"), []
    for now, (operation, number) in enumerate(operations):
        if operation == "place" and router.fleet.states() and router.fleet.states()[0].is_available:
            demand = ask(number * 50 + 1, sequences=1 + number % 3, streamed=bool(number % 2))
            leases.append(router.place(demand, hits(r0=number * 20), float(now)))
        elif operation == "leave":
            router.fleet.leave(R0)
        elif operation == "join":
            router = router if router.fleet.states() else rejoined(router)
        elif operation == "advance":
            router.fleet.advance(float(now))
        elif leases and operation != "place":
            act(leases[number % len(leases)], operation, float(now))
        for promise in router.fleet.promises().values():
            assert min(promise.requests, promise.prefill_tokens, promise.kv_tokens) >= 0
    for lease in leases:
        lease.finish(Outcome.DONE, 1e6)
    for member in {lease._member for lease in leases}:  # those that left meanwhile, too
        assert member.promise == Promise()
        assert (member.sequences, member.running) == (0, 0)


def rejoined(router: Router) -> Router:
    router.fleet.join(router_of("r0").fleet.replicas()[0], 0.0)
    return router


def act(lease: object, operation: str, now: float) -> None:
    if operation == "began":
        lease.began(now)
    elif operation == "refuse":
        lease.refuse(now)
    else:
        lease.finish(Outcome(operation), now, Usage(100, 10, 0))


def test_what_is_confirmed_is_told_with_what_this_router_has_there_itself():
    """It counts what was booked until then and this booking, and no longer what has ended."""
    router = router_of("r0")
    first = router.place(ask(1_000), {}, now=0.0)
    assert (first.promised_tokens, router.place(ask(1_000), {}, now=0.0).promised_tokens) == (1_100, 2_200)
    first.finish(Outcome.DONE, 1.0)
    router.fleet.set_others({R0: Promise(9, 0, 68_000)})
    assert router.place(ask(1_000), {}, now=1.0).promised_tokens == 2_200


def test_a_booking_that_was_known_to_overflow_is_confirmed_up_to_what_was_known():
    """Only what another router did meanwhile is a reason to be refused, and to go where nothing is cached."""
    router = router_of("r0")
    assert router.place(ask(1_000), {}, now=0.0).reserve_limit_tokens == 100_000
    router.fleet.set_others({R0: Promise(9, 0, 100_000)})
    assert router.place(ask(1_000), {}, now=0.0).reserve_limit_tokens == 100_000 + 1_100 + 1_100
