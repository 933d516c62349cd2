"""How long steps take: the floors of sizing at their efficiencies, exact sums, and what is refused."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sim.engine import FS, RooflineTime, StepWork, decode_steps_until, default_time, seconds
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu, hardware_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.speed import decode_step_s, prefill_s

COUNTS = st.integers(0, 10**5)


@cache
def bare(name: str, tp: int = 1) -> RooflineTime:
    """A model on H100s at the floors: data-sheet figures, no overhead."""
    parallel = Parallel(tp=tp)
    floors = {"prefill_efficiency": 1.0, "decode_efficiency": 1.0, "overhead_s": 0.0, "sequence_s": 0.0}
    return RooflineTime(preset(name), gpu("h100"), parallel=parallel, **floors)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("tokens", [1, 3_000, 100_000])
def test_a_decode_step_takes_the_floor_that_sizing_computes(name, tokens):
    """Where memory is the bound, a step is sizing's decode floor: windows, experts, latent and recurrent layers too."""
    floor = decode_step_s(preset(name), gpu("h100"), batch=4, tokens=tokens, parallel=Parallel(tp=2))
    assert seconds(bare(name, 2).decode_fs(1, 4, 4 * tokens)) == pytest.approx(floor, rel=1e-5)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize(("cached", "tokens"), [(0, 20_000), (60_000, 20_000)])
def test_a_long_prefill_takes_the_floor_that_sizing_computes(name, cached, tokens):
    """Where arithmetic is the bound, a step is sizing's prefill floor, with its quadratic part and a cached prefix."""
    floor = prefill_s(preset(name), gpu("h100"), tokens, cached_tokens=cached)
    assert seconds(bare(name).step_fs(StepWork(prefills=((cached, tokens),)))) == pytest.approx(floor, rel=1e-3)


def test_a_short_prefill_waits_for_the_weights():
    """A prompt of one token takes as long as reading the weights."""
    step = seconds(bare("llama-3-8b").step_fs(StepWork(prefills=((0, 1),))))
    assert step == pytest.approx(decode_step_s(preset("llama-3-8b"), gpu("h100"), batch=1, tokens=0))


def test_decoding_beside_a_prefill_is_nearly_free_until_arithmetic_is_the_bound():
    """A step that reads the weights anyway serves a decoding sequence at the price of its cache."""
    time = bare("llama-3-8b")
    alone, beside = (time.step_fs(StepWork(prefills=((0, 64),), decodes=n, kv_tokens=1000 * n)) for n in (0, 8))
    assert seconds(beside - alone) == pytest.approx(8000 * 131_072 / 3.35e12)


def test_overheads_are_paid_once_a_step_and_once_a_sequence():
    """They come on top of what the GPU does."""
    model, h100 = preset("llama-3-8b"), gpu("h100")
    work = StepWork(prefills=((0, 9), (5, 9)), decodes=3, kv_tokens=90)
    plain = RooflineTime(model, h100, overhead_s=0, sequence_s=0).step_fs(work)
    assert RooflineTime(model, h100, overhead_s=1, sequence_s=0.1).step_fs(work) - plain == FS + 5 * FS // 10


def test_speed_divides_the_whole():
    """An engine ten times as fast needs a tenth of the time for anything."""
    work = StepWork(prefills=((0, 1000),), decodes=3, kv_tokens=900)
    assert default_time(10).step_fs(work) == pytest.approx(default_time().step_fs(work) / 10, rel=1e-5)


def test_two_gpus_halve_what_is_split():
    """Tensor parallelism splits arithmetic and bytes."""
    work = StepWork(prefills=((0, 4000),))
    assert bare("llama-3-8b", 2).step_fs(work) == pytest.approx(bare("llama-3-8b").step_fs(work) / 2, rel=1e-5)


@settings(deadline=None)
@given(
    st.sampled_from(["llama-3-8b", "gpt-oss-20b", "llama-4-scout", "deepseek-v3", "nemotron-nano-9b-v2", "gemma-3-4b"]),
    st.integers(1, 300),
    st.integers(1, 600),
    st.integers(0, 10**6),
)
def test_many_steps_take_exactly_the_sum_of_single_ones(name, steps, sequences, kv_tokens):
    """Decode steps may be skipped: the closed form is the sum, to the last digit, across windows and both bounds."""
    time = bare(name)
    singly = sum(
        time.step_fs(StepWork(decodes=sequences, kv_tokens=kv_tokens + step * sequences)) for step in range(steps)
    )
    assert time.decode_fs(steps, sequences, kv_tokens) == singly


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(0, 9000), st.integers(0, FS), st.integers(0, 100))
def test_steps_until_a_moment_are_the_fewest_that_reach_it(sequences, kv_tokens, moment, limit):
    """One step fewer ends before the moment, unless there are none or no more are allowed."""
    time = default_time()
    steps = decode_steps_until(time, moment, sequences, kv_tokens, limit)
    assert steps <= limit
    assert steps == limit or time.decode_fs(steps, sequences, kv_tokens) >= moment
    assert steps == 0 or time.decode_fs(steps - 1, sequences, kv_tokens) < moment


@given(COUNTS, COUNTS, st.integers(0, 999), COUNTS)
def test_more_work_never_takes_less_time(start, tokens, decodes, kv_tokens):
    """Adding one of anything never makes a step shorter, and an empty step costs its overhead."""
    time = default_time()
    work = StepWork(prefills=((start, tokens + 1),), decodes=decodes, kv_tokens=kv_tokens)
    more = StepWork(prefills=((start, tokens + 2),), decodes=decodes + 1, kv_tokens=kv_tokens + 1)
    assert time.step_fs(StepWork()) < time.step_fs(work) < time.step_fs(more)


@pytest.mark.parametrize(
    ("field", "value"),
    [("speed", 0), ("prefill_efficiency", 1.5), ("decode_efficiency", 0), ("overhead_s", -1), ("sequence_s", 1e9)],
)
def test_settings_out_of_range_are_refused(field, value):
    """The error names the setting."""
    with pytest.raises(ConfigError, match=field):
        RooflineTime(preset("llama-3-8b"), gpu("h100"), **{field: value})


def test_figures_that_are_needed_are_asked_for():
    """Hardware without bandwidth or compute is refused before the first step."""
    for known, missing in (("tflops", "--gpu-bandwidth"), ("bandwidth_gb_s", "--gpu-tflops")):
        with pytest.raises(ConfigError, match=missing):
            RooflineTime(preset("llama-3-8b"), hardware_of({"memory_gb": 80, known: 900}))
