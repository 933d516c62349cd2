"""A replica that keeps delivering less than the index predicted counts for less, until it delivers again."""

from __future__ import annotations

import pytest

from kvroute.routing.honesty import PREDICTED_MIN, Honesty
from kvroute.routing.replica import ReplicaId

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


def observed(honesty: Honesty, predicted: int, delivered: int, times: int) -> list[bool]:
    return [honesty.observe(R0, predicted, delivered) for _ in range(times)]


def test_who_delivers_is_believed():
    """Full and slightly short deliveries, and those beyond prediction, change nothing."""
    honesty = Honesty()
    for delivered in (1000, 984, 600, 2000):
        assert not any(observed(honesty, 1000, delivered, 50))
    assert honesty.discounted({R0: 500, R1: 7}) == {R0: 500, R1: 7}
    assert honesty.records[R0].unpredicted > 0


def test_who_does_not_deliver_is_distrusted_once():
    """After enough requests a replica that delivers a fifth counts for a fifth; that it fell is said once."""
    honesty = Honesty()
    falls = observed(honesty, 1000, 200, 30)
    assert (falls.index(True), sum(falls)) == (PREDICTED_MIN, 1) or falls[PREDICTED_MIN - 1 :].count(True) == 1
    assert honesty.discounted({R0: 500, R1: 7}) == {R0: pytest.approx(100, abs=1), R1: 7}
    assert honesty.records[R0].is_distrusted


def test_few_requests_prove_nothing():
    """One lost prediction is an accident, and requests without a prediction are no evidence."""
    honesty = Honesty()
    assert not any(observed(honesty, 1000, 0, PREDICTED_MIN - 1))
    assert not any(observed(honesty, 0, 0, 100))
    assert honesty.discounted({R0: 500}) == {R0: 500}


def test_trust_returns():
    """When what is predicted is delivered again, the past fades."""
    honesty = Honesty()
    observed(honesty, 1000, 0, 20)
    assert honesty.discounted({R0: 1000}) == {R0: 0}
    observed(honesty, 1000, 1000, 300)
    assert honesty.discounted({R0: 1000}) == {R0: 1000}


def test_a_restart_is_a_new_beginning():
    """What is forgotten is believed again."""
    honesty = Honesty()
    observed(honesty, 1000, 0, 20)
    honesty.forget(R0)
    assert (honesty.discounted({R0: 1000}), dict(honesty.records)) == ({R0: 1000}, {})


@pytest.mark.parametrize("share", [0.1, 0.2, 0.29])
def test_holdings_count_by_what_is_delivered(share):
    """The discount is the share that is delivered."""
    honesty = Honesty()
    observed(honesty, 1000, int(1000 * share), 100)
    assert honesty.discounted({R0: 10_000}) == {R0: pytest.approx(10_000 * share, rel=0.01)}
