"""One replica's state: promises, availability, and load that nobody promised."""

from __future__ import annotations

import pytest

from kvroute.kv.chain import hashes_of
from kvroute.routing.cost import work_of
from kvroute.routing.demand import Prefix, Promise
from kvroute.routing.member import FAILURES_MAX, PEAK_WINDOW_S, REPORT_LIFE_S, Booking, Member
from kvroute.routing.rates import ModelRates
from kvroute.routing.replica import Load
from tests.routing.builders import ROUND, chain, replica


def booking(sequences: int, prefill_tokens: int, kv_tokens: int, hit_tokens: int = 0) -> Booking:
    return Booking(sequences, prefill_tokens, kv_tokens, hit_tokens, 0)


def member(**fields: object) -> Member:
    return Member(replica("r0", **fields), 1, ModelRates(ROUND))


def test_a_view_sums_all_routers_promises():
    """Pricing sees what every router promised, not only this one."""
    r0 = member()
    r0.book(booking(2, 100, 500))
    r0.set_others(Promise(requests=3, prefill_tokens=1_000, kv_tokens=7_000))
    view = r0.view
    assert (view.sequences, view.running, view.pending_prefill_tokens, view.kv_tokens) == (5, 3, 1_100, 7_500)


def test_a_view_is_kept_until_something_changes():
    """Placements between two changes share one view, so a large fleet is cheap to price."""
    r0 = member()
    before = r0.view
    assert r0.view is before
    r0.set_others(Promise())
    assert r0.view is before
    r0.book(booking(1, 1, 1))
    assert r0.view is not before


def test_available_means_healthy_not_draining_and_not_failing():
    """Each of the three reasons alone keeps new requests away."""
    assert member().is_available
    for field, value in (("is_healthy", False), ("is_draining", True), ("failures", FAILURES_MAX)):
        r0 = member()
        setattr(r0, field, value)
        assert not r0.is_available


def test_a_report_of_what_was_promised_adds_nothing():
    """Requests that this router sent are not counted again when the engine's gauges show them."""
    r0 = member()
    r0.book(booking(4, 100, 10_000))
    r0.report(Load(running=3, waiting=1, kv_used_fraction=0.1), now=1.0)
    assert (r0.view.sequences, r0.view.kv_tokens) == (4, 10_000)


def test_requests_that_have_just_ended_do_not_linger_in_lagging_gauges():
    """A gauge that still shows requests which ended a moment ago is not taken for foreign load."""
    r0 = member()
    r0.report(Load(), now=0.0)
    r0.book(booking(4, 100, 10_000))
    r0.give_back(booking(4, 100, 10_000), has_begun=False)
    r0.report(Load(running=4, kv_used_fraction=0.1), now=PEAK_WINDOW_S + 1)
    assert (r0.view.sequences, r0.view.kv_tokens) == (0, 0)


def test_load_that_nobody_promised_counts():
    """Requests that reach the engine past the routers make it dearer."""
    r0 = member()
    r0.report(Load(running=5, waiting=2, kv_used_fraction=0.5), now=1.0)
    assert (r0.view.sequences, r0.view.kv_tokens) == (7, 50_000)


def test_an_old_report_is_forgotten():
    """Unexplained load expires with its report; a replica whose metrics are dead is priced by promises alone."""
    r0 = member()
    r0.report(Load(running=5), now=1.0)
    assert r0.stray_until_s == 1.0 + REPORT_LIFE_S
    r0.forget_stray()
    assert r0.view.sequences == 0


def test_the_engines_counters_say_how_full_the_cache_is():
    """All that an engine ever computed fills its cache, until the capacity is reached."""
    r0 = member(capacity_tokens=1_000)
    r0.report(Load(prompt_tokens=700, prefix_hits=300, generation_tokens=100), now=1.0)
    assert r0.view.filled_tokens == 500
    r0.report(Load(prompt_tokens=9_000), now=2.0)
    assert r0.view.filled_tokens == 1_000


def test_adopting_new_figures_keeps_promises_and_health():
    """A replica that tells its capacity later does not lose what was promised to it."""
    r0 = member(capacity_tokens=None)
    r0.book(booking(1, 10, 20))
    r0.adopt(replica("r0", capacity_tokens=5_000), ModelRates(ROUND))
    assert (r0.view.capacity_tokens, r0.promise) == (5_000, Promise(1, 10, 20))


def test_a_prefix_that_all_share_is_booked_once():
    """Where the engine holds far less than the hits summed over its requests, hits weigh less in the next booking."""
    r0 = member()
    for _ in range(40):
        r0.book(booking(1, 100, 4_100, hit_tokens=4_000))
        r0.begin(booking(1, 100, 4_100, hit_tokens=4_000))
    for second in range(30):
        r0.report(Load(running=40, kv_used_fraction=0.20), now=float(second))
    assert r0.view.pinned_share == pytest.approx((20_000 - 4_000) / 160_000)


def test_a_prefix_that_is_known_to_be_shared_counts_once_at_once():
    """Ten requests of 4,000 shared and 200 own tokens ask for 6,000 together, and give back all of it."""
    r0, prefix, work = member(), Prefix(7, 4_000), work_of(4_100, 50, 50.0)
    booked = []
    for _ in range(10):
        added, apart = r0.asks(work, prefix)
        assert added == (200 if booked else 4_200)
        assert apart is prefix
        booked.append(Booking(1, 50, 200, 4_100, 50, prefix))
        r0.book(booked[-1])
    assert r0.promise.kv_tokens == 6_000
    for each in booked:
        r0.give_back(each, has_begun=False)
    assert (r0.promise.kv_tokens, r0.prefixes) == (0, {})


def test_a_prefix_that_is_not_there_is_asked_for_in_full():
    """What is computed anew needs room, whoever else shares it; from then on it is there for the next one."""
    r0, prefix = member(), Prefix(7, 4_000)
    assert r0.asks(work_of(1_000, 3_200, 50.0), prefix) == (4_250.0, prefix)
    r0.book(Booking(1, 3_200, 250, 1_000, 50, prefix))
    assert r0.promise.kv_tokens == 4_250
    assert r0.asks(work_of(4_000, 200, 50.0), prefix) == (250.0, prefix)


def test_a_prompt_that_lost_its_prefix_to_others_computes_a_copy():
    """The prefix is held by another request, but this one does not find it: it needs room of its own."""
    r0, prefix = member(), Prefix(7, 4_000)
    r0.book(Booking(1, 50, 250, 4_000, 50, prefix))
    assert r0.asks(work_of(0, 4_200, 50.0), prefix) == (4_250.0, None)


def test_a_prefix_within_another_counts_once():
    """Twins share their whole prompt of 4,200, of which others have 4,000: each level counts once, whoever leaves."""
    r0 = member()
    outer = Prefix(7, 4_000)
    inner = Prefix(8, 4_200, outer)
    one, two = Booking(1, 50, 250, 4_000, 50, outer), Booking(1, 1, 50, 4_200, 50, inner)
    r0.book(one)
    assert r0.asks(work_of(4_200, 0, 50.0), inner) == (250.0, inner)
    r0.book(two)
    assert r0.promise.kv_tokens == 4_000 + 250 + 200 + 50
    assert r0.asks(work_of(4_200, 0, 50.0), inner) == (50.0, inner)
    r0.give_back(one, has_begun=False)
    assert r0.promise.kv_tokens == 4_000 + 200 + 50
    r0.give_back(two, has_begun=False)
    assert (r0.promise.kv_tokens, r0.prefixes) == (0, {})


def test_who_came_before_its_prefix_was_shared_shares_it_too():
    """The first of a group was booked in full: when another one comes, what both have counts once."""
    r0, chain_ = member(), chain(300)
    prefix = Prefix(hashes_of(chain_)[249], 4_000)
    first = Booking(1, 4_800, 4_850, 0, 50, None, 0, 1.0, chain_, 16)
    stranger = Booking(1, 4_800, 4_850, 0, 50, None, 0, 1.0, chain(300, root=5), 16)
    r0.book(first)
    r0.book(stranger)
    assert r0.share(prefix)
    assert not r0.share(prefix)
    assert r0.promise.kv_tokens == 2 * 4_850
    assert r0.asks(work_of(4_000, 200, 50.0), prefix) == (250.0, prefix)
    r0.book(Booking(1, 200, 250, 4_000, 50, prefix))
    r0.give_back(first, has_begun=False)
    assert r0.promise.kv_tokens == 4_850 + 4_000 + 250


def test_the_most_that_is_held_at_a_time_is_less_than_the_sum_of_all_ends():
    """Of ten answers of 1,000 tokens one begins every second: when one ends, others are at their beginning."""
    r0 = member()
    for number in range(10):
        one = Booking(1, 100, 1_100, 0, 1_000, None, 0, 0.0)
        r0.book(one)
        r0.begin(one, float(number))
    work = work_of(0, 100, 1_000.0)
    assert r0.view.kv_tokens + 1_100 == 12_100
    step_s = ROUND.step_at(10, r0.view.kv_tokens)
    assert r0.peak_with(work, None, 10.0) < 12_100 - sum(range(10)) * 0.9 / step_s
    unsteady = member()
    for number in range(10):
        one = Booking(1, 100, 1_100, 0, 1_000, None, 0, 1.0)
        unsteady.book(one)
        unsteady.begin(one, float(number))
    assert unsteady.peak_with(work, None, 10.0) > 12_100


def test_a_replica_says_how_busy_it_is_and_how_long_it_keeps_things():
    """At 500 prompt tokens of 1 ms and 100 generated ones a second: half busy, and all is new after 1,000 / 600 s."""
    r0 = member(capacity_tokens=1_000)
    for second in range(600):
        r0.report(Load(prompt_tokens=700 * second, prefix_hits=200 * second, generation_tokens=100 * second), second)
    assert r0.view.busy == pytest.approx(0.5, rel=0.01)
    assert r0.turnover_s == pytest.approx(1_000 / 600, rel=0.01)
    r0.report(Load(prompt_tokens=10), 600.0)
    assert r0.view.busy == pytest.approx(0.5, rel=0.01)
