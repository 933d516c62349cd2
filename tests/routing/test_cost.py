"""Every term of the cost, on examples computed by hand: 1,000 prefill tokens a second, steps of 10 ms."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.routing import cost
from kvroute.routing.cost import TERMS, Slo, View, price, work_of
from tests.routing.builders import ROUND

IDLE = View(capacity_tokens=10_000, max_num_seqs=4)
SMALL = work_of(0, 300, 100.0)  # 300 tokens to compute, attention adds 0.5 %

views = st.builds(
    View,
    pending_prefill_tokens=st.integers(0, 100_000),
    running=st.integers(0, 300),
    sequences=st.integers(0, 300),
    kv_tokens=st.integers(0, 500_000),
    capacity_tokens=st.none() | st.integers(1, 400_000),
    max_num_seqs=st.none() | st.integers(1, 256),
    filled_tokens=st.integers(0, 400_000),
)


def test_waiting_is_the_prefill_ahead():
    """A request waits for the prompts that were promised before it, at the replica's prefill rate."""
    assert cost.wait_s(View(pending_prefill_tokens=2_000), SMALL, ROUND) == pytest.approx(2.0)


def test_an_idle_replica_makes_nobody_wait():
    """Where nothing was promised the wait is zero."""
    assert cost.wait_s(IDLE, SMALL, ROUND) == 0.0


def test_a_full_batch_makes_wait_for_a_slot():
    """With all four slots taken, one of four answers must end: a quarter of 100 steps of 10.4 ms."""
    assert cost.room_s(View(sequences=4, max_num_seqs=4), SMALL, ROUND) == pytest.approx(0.25 * 100 * 0.0104)


def test_a_full_cache_makes_wait_for_room():
    """300 tokens over a cache of 9,000 promised ones free up when a thirtieth of the answers has ended."""
    view = View(sequences=3, kv_tokens=9_000, capacity_tokens=9_000)
    assert cost.room_s(view, SMALL, ROUND) == pytest.approx(
        300 / 9_000 * 100 * 0.01102
    )  # 10 ms x (1 + 3 x 0.01 + 9,000 x 8e-6)


def test_prefill_counts_misses_and_the_overhead():
    """Only what the replica does not hold is computed: 10 ms and 300 tokens, each attending to those before it."""
    assert cost.prefill_s(IDLE, SMALL, ROUND) == pytest.approx(0.01 + 0.3 * 1.005)


def test_attention_makes_late_tokens_dearer():
    """300 tokens after 29,850 cached ones cost twice as much as attention-free ones."""
    assert work_of(29_850, 300, 0.0).compute_tokens == pytest.approx(600.0)


def test_a_prefill_stalls_every_running_sequence():
    """Five running sequences lose the prefill's time each, and a hundred of their steps last 0.124 ms longer."""
    assert cost.stall_s(View(running=5), SMALL, ROUND) == pytest.approx(5 * (0.3015 + 100 * 0.01 * 0.0124))


def test_decoding_is_slower_in_a_larger_batch():
    """A hundred steps next to nine others that hold 24,700 tokens: 10 ms x (1 + 10 x 0.01 + 25,000 x 8e-6) each."""
    assert cost.decode_s(View(sequences=9, kv_tokens=24_700), SMALL, ROUND) == pytest.approx(100 * 0.013)


def test_promises_over_the_capacity_are_recomputed():
    """150 of 400 tokens do not fit beside 9,750: one sequence of 29 is preempted, 350 tokens of (9,750 + 400) / 29."""
    view = View(kv_tokens=9_750, capacity_tokens=10_000, sequences=28)
    assert cost.overflow_s(view, SMALL, ROUND) == pytest.approx(0.350)


def test_a_large_overflow_preempts_more_than_one():
    """390 tokens that do not fit are more than a sequence of 350."""
    view = View(kv_tokens=9_990, capacity_tokens=10_000, sequences=29)
    assert cost.overflow_s(view, SMALL, ROUND) == pytest.approx(0.390)


def test_overflow_that_was_there_before_is_not_charged_again():
    """A request pays for its own tokens, or one sequence, however overcommitted the replica is."""
    view = View(kv_tokens=90_000, capacity_tokens=10_000, sequences=499)
    assert cost.overflow_s(view, SMALL, ROUND) == pytest.approx(0.4)


def test_filling_a_full_cache_costs_what_it_evicts():
    """Where the cache is full of kept prefixes, a quarter of the 400 evicted tokens is taken to be asked for again."""
    view = View(filled_tokens=10_000, capacity_tokens=10_000)
    assert cost.overflow_s(view, SMALL, ROUND) == pytest.approx(0.25 * 0.4)


def test_an_unknown_capacity_never_overflows():
    """Before a replica has told its capacity nothing is charged for it."""
    assert cost.overflow_s(View(kv_tokens=10**9, filled_tokens=10**9), SMALL, ROUND) == 0.0


def test_the_weight_takes_the_rest_out():
    """With a weight of 1 only what delays the first token, and lost cache, counts."""
    view = View(running=5, sequences=5, capacity_tokens=10_000)
    first, part = (dict(zip(TERMS, price(view, SMALL, ROUND, weight), strict=True)) for weight in (1.0, 0.25))
    assert (first["stall"], first["decode"]) == (0.0, 0.0)
    assert part["stall"] == pytest.approx(0.75 * cost.stall_s(view, SMALL, ROUND))
    assert part["decode"] == pytest.approx(0.75 * cost.decode_s(view, SMALL, ROUND))
    assert [first[term] for term in ("wait", "copy", "prefill", "adapter", "overflow")] == [
        part[term] for term in ("wait", "copy", "prefill", "adapter", "overflow")
    ]


def test_blocks_on_a_lower_tier_are_copied_not_computed():
    """800 of 1,000 hit tokens lie on the CPU: they take a copy each and room, and no prefill."""
    work, rates = work_of(1_000, 100, 50.0, copy_tokens=800), replace(ROUND, copy_token_s=1e-5)
    assert cost.copy_s(IDLE, work, rates) == pytest.approx(0.008)
    assert work.compute_tokens == work_of(1_000, 100, 50.0).compute_tokens
    assert cost.kv_tokens(IDLE, work) == cost.kv_tokens(IDLE, work_of(1_000, 100, 50.0))
    assert work.new_tokens == 100 + 800 + 50


def test_an_adapter_that_is_not_loaded_costs_its_loading():
    """The time is charged once, where it was not used lately."""
    assert cost.adapter_s(IDLE, work_of(0, 300, 100.0, loads_adapter=True), ROUND) == ROUND.adapter_s
    assert cost.adapter_s(IDLE, SMALL, ROUND) == 0.0


def test_an_slo_is_met_by_both_of_its_times():
    """300 tokens take 0.3115 s; a step beside three sequences of 9,700 tokens takes 11.2 ms."""
    view = View(sequences=3, kv_tokens=9_700)
    assert Slo(0.32, 0.0113).is_met(view, SMALL, ROUND)
    assert not Slo(0.31, 0.0113).is_met(view, SMALL, ROUND)
    assert not Slo(0.32, 0.0111).is_met(view, SMALL, ROUND)


@given(views, st.integers(0, 100_000), st.integers(1, 100_000), st.floats(0, 1))
def test_no_term_is_negative_and_a_hit_never_costs_more(view: View, hit: int, miss: int, weight: float):
    """On the same replica, holding more of a prompt never makes it dearer."""
    cold, warm = work_of(0, hit + miss, 100.0), work_of(hit, miss, 100.0)
    terms = price(view, warm, ROUND, weight)
    assert min(terms) >= 0.0
    assert sum(terms) <= sum(price(view, cold, ROUND, weight)) * (1 + 1e-9)


@given(
    views,
    st.integers(0, 50_000),
    st.integers(1, 50_000),
    st.floats(0.0, 2_000.0),
    st.integers(1, 8),
    st.floats(0.0, 1.0),
    st.floats(0.0, 1.0),
    st.booleans(),
)
def test_the_total_is_the_sum_of_the_terms(view, hit, miss, output, sequences, copied, weight, loads):
    """What replicas are compared by is the sum of the terms that explain it."""
    work = work_of(hit, miss, output, sequences, copy_tokens=int(copied * hit), loads_adapter=loads)
    total = cost.total_s(view, work, ROUND, weight)
    assert total == pytest.approx(sum(price(view, work, ROUND, weight)), rel=1e-9)
