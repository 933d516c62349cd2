"""How long steps take."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.sim.engine import StepTime, StepWork

COUNTS = st.integers(0, 10**6)


def test_each_part_of_the_work_is_charged_its_rate():
    """A step's time is the sum of its parts at the stated rates."""
    time = StepTime(base_s=1, prefill_token_s=10, prefill_pair_s=100, decode_s=1000, kv_token_s=10_000)
    assert (
        time.seconds(StepWork(prefill_tokens=2, prefill_pairs=3, decodes=4, kv_tokens=5))
        == 1 + 20 + 300 + 4000 + 50_000
    )


def test_speed_divides_the_whole():
    """An engine ten times as fast needs a tenth of the time for anything."""
    work = StepWork(prefill_tokens=1000, prefill_pairs=500_000, decodes=3, kv_tokens=900)
    assert StepTime(speed=10).seconds(work) == pytest.approx(StepTime().seconds(work) / 10)


@given(COUNTS, COUNTS, COUNTS, COUNTS)
def test_more_work_never_takes_less_time(tokens, pairs, decodes, kv_tokens):
    """Adding one of anything makes a step longer, and an empty step costs its overhead."""
    work = StepWork(prefill_tokens=tokens, prefill_pairs=pairs, decodes=decodes, kv_tokens=kv_tokens)
    more = StepWork(prefill_tokens=tokens + 1, prefill_pairs=pairs + 1, decodes=decodes + 1, kv_tokens=kv_tokens + 1)
    time = StepTime()
    assert time.seconds(StepWork()) == time.base_s <= time.seconds(work) < time.seconds(more)


@pytest.mark.parametrize("speed", [0, -1])
def test_a_speed_that_stands_still_is_refused(speed):
    """The error names the setting."""
    with pytest.raises(ValueError, match="speed must be greater than 0"):
        StepTime(speed=speed)
