"""Expected answer lengths."""

from __future__ import annotations

import pytest

from kvroute.routing.outputs import KEYS_MAX, SEED_TOKENS, OutputEstimates
from tests.routing.builders import ask


def free(tenant: str = "a", **fields: object):
    return ask(100, tenant=tenant, output_tokens=None, **fields)


def test_an_unknown_model_takes_the_seed():
    """Before any answer was seen the constant holds."""
    assert OutputEstimates().expect(free()) == SEED_TOKENS


def test_the_clients_bound_is_an_upper_limit():
    """An answer is never expected to be longer than the client allows, and a large bound is not an expectation."""
    outputs = OutputEstimates()
    assert outputs.expect(ask(100, output_tokens=16)) == 16.0
    assert outputs.expect(ask(100, output_tokens=100_000)) == SEED_TOKENS


def test_a_tenants_answers_are_learnt():
    """A tenant's mean converges to what its answers came to."""
    outputs = OutputEstimates()
    for _ in range(100):
        outputs.learn(free(), 1_000)
    assert outputs.expect(free()) == pytest.approx(1_000, rel=0.05)


def test_a_new_tenant_takes_the_models_mean():
    """What is known of the model is better than the seed."""
    outputs = OutputEstimates()
    for _ in range(100):
        outputs.learn(free("a"), 1_000)
    assert outputs.expect(free("b")) == pytest.approx(1_000, rel=0.05)


def test_several_answers_share_the_count():
    """The engine's count is over all sequences; the estimate is for one."""
    outputs = OutputEstimates()
    for _ in range(100):
        outputs.learn(free(sequences=4), 400)
    assert outputs.expect(free()) == pytest.approx(100, rel=0.05)


def test_tenants_that_come_and_go_do_not_pile_up():
    """The estimates are bounded, and the bound drops the longest unused."""
    outputs = OutputEstimates()
    for number in range(3 * KEYS_MAX):
        outputs.learn(free(f"t{number}"), 9)
    assert len(outputs._tokens) == KEYS_MAX
    assert outputs.expect(free(f"t{3 * KEYS_MAX - 1}")) < SEED_TOKENS


def test_an_answer_that_never_ended_moves_little():
    """Of a million tokens eight times the expected count: 0.95 x 100 + 0.05 x 800."""
    outputs = OutputEstimates()
    for _ in range(400):
        outputs.learn(free(), 100)
    outputs.learn(free(), 1_000_000)
    assert outputs.expect(free()) == pytest.approx(0.95 * 100 + 0.05 * 800)


def test_how_much_answers_differ_is_learnt():
    """Nothing is known at first; answers that are all alike can be foreseen, others less."""
    outputs = OutputEstimates()
    assert outputs.spread("m") == 1.0
    for number in range(400):
        outputs.learn(free(), 100)
        outputs.learn(ask(100, "b", output_tokens=None), 50 if number % 2 else 150)
    assert outputs.spread("m") < 0.01
    assert outputs.spread("b") == pytest.approx(0.5, rel=0.1)
