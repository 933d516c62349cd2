"""For how long caches are kept: by what serves the most, on a replica in which 20 conversations fit."""

from __future__ import annotations

from math import exp

import pytest

from kvroute.routing.memory_plan import LONGEST_S, Turns, best_plan, population, turns_served
from kvroute.routing.rates import Rates

RATES = Rates(fixed_s=0.0, token_s=0.0001, step_s=0.02, sequence_growth=0.0, kv_growth=0.0)
ENDS_S = [2.0**step / 16 for step in range(18)]


def turns(mean_pause_s: float, ends: float = 0.0) -> Turns:
    """Answers of 250 tokens, 5 s; prefills of 0.05 s where the history is cached, 1.5 s where it is not."""
    if mean_pause_s == 0:
        shares = [1.0] + [0.0] * 17
    else:
        starts = [0.0, *ENDS_S[:-1]]
        shares = [exp(-a / mean_pause_s) - exp(-b / mean_pause_s) for a, b in zip(starts, ENDS_S, strict=True)]
    return Turns(500.0, 15_000.0, 250.0, 15_000.0, ends, list(zip(ENDS_S, shares, strict=True)))


def test_without_memory_all_run_and_all_miss():
    """Twenty running turns, each 5 s of steps and 20 prefills of 1.5 s in their way: 20 / 35 a second."""
    assert turns_served(turns(0.0), 20.0, RATES, 0.0, 0.0, 0.0) == pytest.approx(20 / 35)


def test_agents_without_pauses_keep_their_caches_and_need_no_time_for_it():
    """20 / (5 + 20 x 0.05), three times as many; the shortest memory that catches the pauses is the best."""
    plan = best_plan(turns(0.0), 20.0, RATES)
    assert plan.memory_s == 1 / 16
    assert plan.turns_s == pytest.approx(20 / 6, rel=0.01)


def test_the_longer_the_pauses_the_less_is_it_worth():
    """With pauses of seconds caches are kept for longer than most of them; with pauses of minutes not at all."""
    short, middle, long = (best_plan(turns(mean), 20.0, RATES) for mean in (2.0, 20.0, 600.0))
    assert short.memory_s >= 4.0
    assert short.turns_s > middle.turns_s > long.turns_s
    assert long.memory_s == 0.0


def test_room_is_what_running_and_kept_ones_share():
    """Keeping each for 10 s at X turns a second: n + 10 X = 20 and X = n / (5 + 0.05 n)."""
    served = turns_served(turns(0.0), 20.0, RATES, 10.0, 1.0, 10.0)
    running = 20 - 10 * served
    assert served == pytest.approx(running / (5 + 0.05 * running), rel=0.001)


def test_conversations_that_end_make_memory_dearer():
    """What is kept for nobody is lost room."""
    assert best_plan(turns(4.0, ends=0.5), 20.0, RATES).turns_s < best_plan(turns(4.0), 20.0, RATES).turns_s


def test_nobodys_place_is_kept_for_longer_than_ten_minutes():
    """However rare and long pauses are, and however much room there is, the plan has an end."""
    plan = best_plan(turns(5_000.0), 100_000.0, RATES)
    assert plan.memory_s <= LONGEST_S


def test_long_pauses_need_no_seats_where_eviction_copes():
    """Readers who pause for minutes keep an engine little busy: many more than fit may live there."""
    assert population(turns(300.0), 20.0, RATES, 1.0) > 100


def test_agents_without_pauses_outgrow_a_cache_at_once():
    """Who never pauses has a turn under way all the time: hardly more can live than fit."""
    assert 18 < population(turns(0.0), 20.0, RATES, 1.0) < 24


def test_the_more_answers_count_the_less_may_prefills_stand_in_their_way():
    """What an engine may recompute falls with the weight of first tokens, to nothing."""
    several = [population(turns(60.0), 20.0, RATES, weight) for weight in (1.0, 0.8, 0.4, 0.0)]
    assert several == sorted(several, reverse=True)
    assert several[-1] == 0.0
