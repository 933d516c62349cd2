"""What conversations usually do, on numbers computed by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.conversations import Conversation
from kvroute.routing.habits import (
    GROWTH_SEED_TOKENS,
    HORIZONS,
    MODELS_MAX,
    PAUSE_MIN_S,
    STEPS,
    HabitBook,
    Habits,
    first_turn,
    pause_end_s,
    pause_step,
    turn_step,
)
from tests.routing.builders import ask


def conversation(turns: int, tokens: int, first: int = 1_000, shared: int = 0) -> Conversation:
    made = Conversation(1, ask(first), shared, 0.0)
    made.turns, made.tokens = turns, tokens
    return made


def runs(habits: Habits, turns: int, times: int, growth: int = 200) -> None:
    """Show conversations that all end after so many turns."""
    for _ in range(times):
        for turn in range(2, turns + 1):
            made = conversation(turn, 1_000 + (turn - 1) * growth)
            made.growth_tokens = growth
            habits.learn_turn(made)
        habits.learn_end(turns)


def test_before_anything_was_seen_long_ones_go_on_for_long():
    """After one turn a third ends, after two a fifth, after three a seventh."""
    habits = Habits()
    assert habits.goes_on_for(1, 1) == pytest.approx(2 / 3)
    assert habits.goes_on_for(2, 2) == pytest.approx(4 / 5 * 6 / 7)
    assert habits.goes_on_for(40, 8) > 0.8 > habits.goes_on_for(4, 8)


def test_runs_of_a_known_length_are_foreseen():
    """Of runs that all end after six turns one in its fifth goes on once more and hardly ever twice."""
    habits = Habits()
    runs(habits, 6, 200)
    assert habits.goes_on_for(5, 1) > 0.95
    assert habits.goes_on_for(5, 2) < 0.05
    assert habits.ends == pytest.approx(1 / 6, rel=0.15)


def test_single_prompts_are_known_to_be_single():
    """Where nobody ever goes on, a conversation that has ended reserves next to nothing."""
    habits = Habits()
    for _ in range(300):
        habits.learn_end(1)
    made = conversation(1, 5_000)
    assert habits.forecast(made, 0.0)[0] < 50
    made.is_under_way = True
    assert habits.forecast(made, 100.0)[0] == 5_100


def test_a_forecast_adds_growth_and_takes_off_who_has_ended():
    """Own tokens and what each turn adds, times the chance to be alive: after one turn 2/3, after two 2/3 x 4/5."""
    made = conversation(1, 1_300, first=1_300, shared=300)
    forecast = Habits().forecast(made, 0.0)
    assert len(forecast) == len(HORIZONS)
    assert forecast[0] == pytest.approx(1_000 * 2 / 3)
    assert forecast[1] == pytest.approx((1_000 + GROWTH_SEED_TOKENS) * 2 / 3)
    assert forecast[2] == pytest.approx((1_000 + 2 * GROWTH_SEED_TOKENS) * 2 / 3 * 4 / 5)


def test_growth_is_the_conversations_own_where_it_has_shown_it():
    """Nine turns of 100 tokens count three times as much as everybody's 500."""
    made = conversation(10, 1_900)
    assert Habits().growth_of(made) == pytest.approx((900 + 3 * 500) / 12)


def test_growth_is_learnt_from_all():
    """After many turns of 200 tokens the seed is forgotten."""
    habits = Habits()
    runs(habits, 6, 50)
    assert habits.growth_tokens == pytest.approx(200, rel=0.01)


def test_pauses_are_kept_by_powers_of_two():
    """Ninety pauses of a second and ten of a minute: the median is within 1 s, the 95th of 100 within 64 s."""
    habits = Habits()
    for number in range(1_000):
        habits.learn_pause(60.0 if number % 10 == 0 else 1.0)
    assert habits.pause_quantile_s(0.5) == 2.0
    assert habits.pause_quantile_s(0.95) == 64.0
    assert sum(share for _, share in habits.pauses()) == pytest.approx(1.0)


@given(st.integers(1, 100_000))
def test_steps_of_turns_cover_all_numbers(turns: int):
    """Each number of turns lies in the step that begins at or before it, and before the next."""
    step = turn_step(turns)
    assert first_turn(step) <= turns
    assert step == STEPS - 1 or turns < first_turn(step + 1)


@given(st.floats(0, 1e6))
def test_steps_of_pauses_cover_all_times(pause_s: float):
    """A pause is at most as long as its step's end, but for the last one, and longer than the step before."""
    step = pause_step(pause_s)
    assert step == len(Habits().pauses()) - 1 or pause_s <= pause_end_s(step)
    assert pause_s >= (pause_end_s(step - 1) if step else 0.0)
    assert pause_end_s(0) == PAUSE_MIN_S


@given(st.integers(1, 500), st.integers(0, 64), st.integers(0, 64))
def test_chances_are_chances_and_multiply(turns: int, more: int, further: int):
    """To go on for a and then for b turns is to go on for a + b; it never becomes likelier with length."""
    habits = Habits()
    runs(habits, 12, 20)
    whole, part = habits.goes_on_for(turns, more + further), habits.goes_on_for(turns, more)
    assert 0 < whole <= part <= 1
    assert whole == pytest.approx(part * habits.goes_on_for(turns + more, further))


def test_models_are_bounded():
    """Names that come and go do not pile up."""
    book = HabitBook()
    first = book.of("m0")
    for number in range(1, MODELS_MAX + 1):
        book.of(f"m{number}")
    assert book.of("m0") is not first


def test_who_is_silent_for_long_returns_less_and_less():
    """After pauses of about 4 s and a tenth that ends: nearly sure at first, hardly likely after a minute."""
    habits = Habits()
    for _ in range(200):
        habits.learn_pause(4.0)
    chances = [habits.returns_after(silent_s) for silent_s in (0.0, 3.0, 60.0)]
    assert chances == sorted(chances, reverse=True)
    assert chances[-1] == 0.0


def test_of_the_silent_those_that_pause_count_as_live():
    """Who has a turn under way lives; of the silent ones as many as pause at a time, not those that have ended."""
    habits = Habits()
    habits.under_way, habits.silent = 3, 10
    before = habits.live()
    assert 3 < before < 13
    for _ in range(300):
        habits.learn_end(1)
    assert 3 < habits.live() < 0.7 * before
