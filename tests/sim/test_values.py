"""Settings of the simulated engine that contradict themselves."""

from __future__ import annotations

import pytest

from kvroute.sim.values import Limits, Step


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_num_batched_tokens", 0),
        ("max_num_seqs", 0),
        ("long_prefill_token_threshold", -1),
        ("watermark", 1.0),
        ("watermark", -0.1),
    ],
)
def test_a_limit_out_of_range_is_refused(field, value):
    """The error names the setting."""
    with pytest.raises(ValueError, match=field):
        Limits(**{field: value})


def test_a_step_tells_its_duration_in_seconds():
    """Femtoseconds are for sums, seconds for readers."""
    assert Step(2_500_000_000_000, {}, {}, ()).duration_s == 0.0025
