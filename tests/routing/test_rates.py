"""Rates: pooled, robust, and equal where replicas do not clearly differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.routing.rates import MODELS_MAX, RATIO_MAX, SEED, ModelRates, RateBook, Rates, Speed, Steady
from tests.routing.builders import ROUND


def taught(rates: ModelRates, speed: Speed, token_s: float, step_s: float, times: int = 60) -> None:
    """Show a replica of the given speed, many times, with and without much to compute."""
    for _ in range(times):
        rates.learn_prefill(speed, 16, 0.02 + 16 * token_s)
        rates.learn_prefill(speed, 4_000, 0.02 + 4_000 * token_s)
        rates.learn_step(speed, 100, 100 * step_s * (1 + 0.01 * 8 + 8e-6 * 20_000), 8, 20_000)


def test_step_time_grows_with_the_batch():
    """Ten sequences that hold 25,000 tokens: 10 ms x (1 + 10 x 0.01 + 25,000 x 0.000008)."""
    assert ROUND.step_at(10, 25_000) == pytest.approx(0.013)


def test_rates_are_learnt_from_a_seed_that_is_far_off():
    """A replica ten times faster than the seed is known as such after some requests."""
    rates, speed = ModelRates(ROUND), Speed()
    taught(rates, speed, token_s=0.0001, step_s=0.001)
    learnt = rates.rates_of(speed)
    assert learnt.token_s == pytest.approx(0.0001, rel=0.1)
    assert learnt.step_s == pytest.approx(0.001, rel=0.1)
    assert learnt.fixed_s == pytest.approx(0.02, rel=0.2)


def test_a_new_replica_starts_with_what_its_peers_taught():
    """A replica that has shown nothing yet is taken to be like the others of its model."""
    rates, old = ModelRates(ROUND), Speed()
    taught(rates, old, token_s=0.0005, step_s=0.004)
    assert rates.rates_of(Speed()) == rates.published
    assert rates.published.token_s == pytest.approx(0.0005, rel=0.1)


def test_noise_does_not_tell_replicas_apart():
    """Two replicas whose speeds differ by a tenth have the same rates, so neither starves."""
    rates, one, two = ModelRates(ROUND), Speed(), Speed()
    for _ in range(40):
        taught(rates, one, token_s=0.00100, step_s=0.0100, times=1)
        taught(rates, two, token_s=0.00110, step_s=0.0110, times=1)
    assert rates.rates_of(one) == rates.rates_of(two)


def test_a_slow_replica_is_told_apart():
    """A replica three times slower than its peer is known to be slower, at about that factor."""
    rates, fast, slow = ModelRates(ROUND), Speed(), Speed()
    for _ in range(60):
        taught(rates, fast, token_s=0.001, step_s=0.01, times=1)
        taught(rates, slow, token_s=0.003, step_s=0.03, times=1)
    ratio = rates.rates_of(slow).token_s / rates.rates_of(fast).token_s
    assert 2.4 < ratio < 3.6


def test_an_outlier_moves_little():
    """One first token after ten minutes does not make a replica look slow."""
    rates, speed = ModelRates(ROUND), Speed()
    taught(rates, speed, token_s=0.001, step_s=0.01)
    before = rates.rates_of(speed).token_s
    rates.learn_prefill(speed, 4_000, 600.0)
    assert rates.rates_of(speed).token_s < before * 1.1


def test_short_answers_teach_no_step_time():
    """An answer of a few tokens says nothing about the step time."""
    rates = ModelRates(ROUND)
    rates.learn_step(Speed(), 3, 9.0, 1, 0)
    assert rates.published == ROUND


def test_small_moves_are_not_published():
    """What changes no decision changes no version, so that nothing is recomputed for it."""
    rates, speed = ModelRates(ROUND), Speed()
    rates.learn_step(speed, 100, 1.01 * 1.01, 1, 0)
    assert rates.version == 0


@given(st.lists(st.floats(1e-9, 1e12), max_size=200))
def test_an_estimate_stays_between_what_was_seen(observations: list[float]):
    """An estimate is positive and never leaves the range of the seed and the observations."""
    steady = Steady(1.0)
    for observed in observations:
        steady.learn(observed / steady.value)
    seen = [1.0, *observations]
    assert min(seen) * (1 - 1e-9) <= steady.value <= max(seen) * (1 + 1e-9)


def test_one_observation_counts_at_most_four_times():
    """The first observation moves the seed by half of at most a factor of four, on a logarithmic scale."""
    steady = Steady(1.0)
    steady.learn(1e9)
    assert steady.value == pytest.approx(RATIO_MAX**0.5)


def test_the_book_is_bounded():
    """Names of models that come and go do not pile up."""
    book = RateBook(Rates())
    first = book.of("m0")
    for number in range(1, MODELS_MAX + 1):
        book.of(f"m{number}")
    assert book.of("m0") is not first
    assert book.of(f"m{MODELS_MAX}") is book.of(f"m{MODELS_MAX}")


def test_seed_of_one_model():
    """A model's own seed counts until it has been learnt from, and touches no other model."""
    book = RateBook()
    fast = Rates(0.01, 1e-6, 0.001)
    book.seed("fast", fast)
    assert book.of("fast").published == fast
    assert book.of("other").published == SEED
    book.seed("other", fast)
    assert book.of("other").published == SEED
