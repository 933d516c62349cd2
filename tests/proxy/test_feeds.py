"""Health that does not flap. The watchers themselves are tested with real replicas in tests/proxy/test_app.py."""

import pytest

from kvroute.proxy.feeds import Hysteresis


@pytest.mark.parametrize(
    ("answers", "healths"),
    [
        ("+", "H"),
        ("-", "u"),
        ("+--+--+", "HHHHHHH"),
        ("+---", "HHHu"),
        ("+---+", "HHHuH"),
        ("+--+---", "HHHHHHu"),
    ],
)
def test_hysteresis(answers, healths):
    """Three failures in a row take a replica out, one success brings it back, and fewer change nothing."""
    health = Hysteresis(unhealthy_after=3, healthy_after=1)
    seen = ""
    for answer in answers:
        health.observe(answer == "+")
        seen += "H" if health.is_healthy else "u"
    assert seen == healths


def test_recovery_may_need_several():
    """With healthy_after at 2, one good answer between failures does not bring a replica back."""
    health = Hysteresis(unhealthy_after=1, healthy_after=2)
    changes = [health.observe(answer == "+") for answer in "+-++-"]
    assert changes == [False, False, False, True, True]
