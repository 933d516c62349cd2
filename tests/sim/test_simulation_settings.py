"""What a simulation is told."""

from __future__ import annotations

import pytest

from kvroute.errors import ConfigError
from kvroute.sim.replica import Limits
from kvroute.sim.simulation_settings import Happening, RouterSettings, check_happenings, happening_of
from tests.sim.fleets import engine


def test_a_context_is_at_most_what_the_cache_holds():
    """Prompt and answer together fit the usable blocks, or the model's context where that is shorter."""
    assert engine(1600).context_tokens == 1600
    assert engine(1609).num_blocks == 101
    assert engine(1600, max_model_len=512).context_tokens == 512


def test_prompts_that_no_step_could_hold_are_refused():
    """Without chunks they would wait for ever; vLLM does not start with such a budget."""
    limits = Limits(max_num_batched_tokens=1599, enable_chunked_prefill=False)
    with pytest.raises(ConfigError, match="max_num_batched_tokens"):
        engine(1600, limits=limits)
    assert engine(1600, limits=limits, max_model_len=1599).context_tokens == 1599


@pytest.mark.parametrize(("text", "kind"), [("60:crash:3", "crash"), ("60:join:3", "join"), ("60.0:leave:3", "leave")])
def test_happenings_are_read(text, kind):
    """A happening is written as time, kind and number."""
    assert happening_of(text) == Happening(60.0, kind, 3)


@pytest.mark.parametrize("text", ["", "crash", "60:crash", "60:explode:1", "-1:crash:1", "1:crash:-1", "x:join:1"])
def test_other_happenings_are_refused(text):
    """The error shows the form."""
    with pytest.raises(ConfigError, match="60:crash:3"):
        happening_of(text)


@pytest.mark.parametrize(
    ("field", "value"),
    [("event_loss", 1.1), ("ledger_loss", -0.1), ("event_lag_s", -1), ("count", 0), ("metrics_every_s", 0)],
)
def test_settings_out_of_range_are_refused(field, value):
    """The error names the setting."""
    with pytest.raises(ConfigError, match="routers" if field == "count" else field):
        RouterSettings(**{field: value})


def test_a_replica_that_crashed_may_join_again_and_a_new_one_may_leave():
    """Happenings are checked in the order of their times, not in that in which they are written."""
    check_happenings((Happening(9.0, "join", 1), Happening(5.0, "crash", 1)), 2, 100)
    check_happenings((Happening(5.0, "join", 2), Happening(9.0, "leave", 2)), 2, 100)
    with pytest.raises(ConfigError, match="there is no replica 1 then"):
        check_happenings((Happening(5.0, "crash", 1), Happening(9.0, "crash", 1)), 2, 100)
