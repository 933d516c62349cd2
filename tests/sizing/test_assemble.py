"""The report as a whole."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sizing.assemble import report_of
from kvroute.sizing.capacity import Parallel, Share
from kvroute.sizing.hardware import GPUS, gpu, hardware_of
from kvroute.sizing.model import model_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.report import Report, Wishes

GB = 10**9


def report(name, gpus=("h100",), **wishes):
    """Size a preset."""
    return report_of(preset(name), [gpu(one) for one in gpus], Wishes(**wishes))


def test_the_figures_of_a_model():
    """Bytes, layers and both answers for windows are in the report."""
    found = report("gpt-oss-120b")
    assert (found.kv_bytes_per_token, found.kv_bytes_per_token_all_layers) == (36_864, 73_728)
    assert (found.layers, found.full_layers, found.window_layers, found.state_layers) == (36, 18, 18, 0)
    assert report("qwen3-next-80b").state_layers == 36


def test_machines_stand_side_by_side():
    """H100 and H200 at 90 % with 16 GB of weights hold 53 and 105 conversations of 8,000 tokens."""
    found = report("llama-3.1-8b", ("h100", "h200"), weights_bytes=16 * GB, utilisation=0.9)
    assert [[fit.conversations for fit in one.fits] for one in found.machines] == [[53, 13, 3], [105, 26, 6]]
    assert [fit.conversations_fp8 for fit in found.machines[0].fits] == [106, 26, 6]
    step = next(row for row in found.machines[0].decode if row.batch == 32)
    assert step.tokens_per_s_per_user == pytest.approx(68, rel=0.01)


def test_a_model_that_loads_and_cannot_serve_is_warned_of():
    """70 GB of weights leave an H100 two: nothing of 8,000 tokens fits, and vLLM would not start."""
    found = report("llama-3-70b", weights_bytes=70 * GB, utilisation=0.9)
    assert any("cannot serve one conversation of 8,000" in warning for warning in found.machines[0].warnings)
    assert any("refuses to start" in warning for warning in found.machines[0].warnings)


def test_a_model_that_does_not_load_says_how_many_gpus_it_needs():
    """Llama 3.1 405B in 16 bits needs 16 H100s."""
    machine = report("llama-3.1-405b").machines[0]
    assert machine.vllm is None
    assert machine.warnings == ("does not load: the weights need at least 16 of these GPUs (try --tp 16)",)


def test_parallelism_that_repeats_heads_is_warned_of():
    """Both for few heads and for latent attention."""
    assert "repeats the model's 4 KV heads" in "".join(
        report("qwen2.5-7b", parallel=Parallel(tp=8)).machines[0].warnings
    )
    assert "--dcp spreads" in "".join(report("deepseek-v2-lite", parallel=Parallel(tp=2)).machines[0].warnings)


def test_parallelism_that_vllm_refuses_is_warned_of():
    """28 query heads cannot be split over 8 GPUs."""
    assert "does not divide the 28 query heads" in "".join(
        report("qwen2.5-7b", parallel=Parallel(tp=8)).machines[0].warnings
    )


def test_mixes_and_common_prefixes():
    """A peak mix fits fewer than its mean length suggests; a shared prefix is counted once."""
    found = report(
        "llama-3.1-8b",
        mix=(Share(0.95, 8_000), Share(0.05, 64_000)),
        users=50,
        prefix_tokens=4_000,
        weights_bytes=16 * GB,
        utilisation=0.9,
    )
    assert found.machines[0].mix_conversations == 39
    assert [round(value / GB, 2) for value in found.shared_prefix_bytes] == [26.21, 0.52]


def test_lengths_keep_to_the_context():
    """Usual lengths past the model's context are left out; lengths that the user chose are kept."""
    assert [row.tokens for row in report("llama-3-8b").lengths] == [8_000]
    assert [row.tokens for row in report("opt-13b").lengths] == [2_048]
    assert [row.tokens for row in report("llama-3-8b", lengths=(64_000,)).lengths] == [64_000]


def test_hardware_without_speed_gives_no_speed():
    """A GPU of which only the memory is known is sized, not timed."""
    found = report_of(preset("llama-3-8b"), [hardware_of({"memory_gb": 24})], Wishes())
    assert found.machines[0].fits
    assert (found.machines[0].decode, found.machines[0].prefill, found.machines[0].copy_pays_from_tokens) == (
        (),
        (),
        {},
    )


def test_unknown_weights_are_asked_for():
    """A partial configuration is answered for its cache, and for GPUs once the weights' size is given."""
    model = model_of({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "torch_dtype": "bfloat16"})
    partial = report_of(model, [gpu("l4")], Wishes())
    assert (partial.kv_bytes_per_token, partial.machines) == (128, ())
    assert "--weights" in partial.notes[-1]
    assert report_of(model, [gpu("l4")], Wishes(weights_bytes=GB)).machines[0].fits


@pytest.mark.parametrize(
    ("wishes", "complaint"),
    [
        ({"lengths": (0,)}, "--context"),
        ({"batches": (-1,)}, "--batch"),
        ({"utilisation": 0.0}, "--utilisation"),
        ({"utilisation": float("nan")}, "--utilisation"),
        ({"parallel": Parallel(tp=0)}, "--tp"),
        ({"parallel": Parallel(tp=4_096)}, "--tp"),
        ({"weights_bytes": -1}, "cannot be negative"),
        ({"working_bytes": -1}, "cannot be negative"),
        ({"users": -1}, "--users"),
        ({"max_model_len": 10**9}, "--max-model-len"),
        ({"cache_dtype": "int3"}, "int3"),
        ({"mix": (Share(0.5, 1),)}, "add up to 1"),
        ({"block_size": 0}, "block_size"),
    ],
)
def test_wishes_out_of_range(wishes, complaint):
    """Each is refused with its flag."""
    with pytest.raises(ConfigError, match=complaint):
        report("llama-3-8b", **wishes)


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(sorted(PRESETS)),
    st.sampled_from(sorted(GPUS)),
    st.sampled_from([1, 2, 4, 8, 16]),
    st.lists(st.integers(1, 300_000), min_size=1, max_size=3).map(tuple),
    st.sampled_from(["auto", "fp8"]),
)
def test_every_model_on_every_gpu(name, one, tp, lengths, dtype):
    """A report is made for any combination, and survives JSON."""
    made = report(name, (one,), lengths=lengths, parallel=Parallel(tp=tp), cache_dtype=dtype)
    assert msgspec.json.decode(msgspec.json.encode(made), type=Report) == made


def test_a_length_past_the_models_context_is_warned_of():
    """vLLM refuses --max-model-len beyond the context that the model was made for, whatever memory there is."""
    found = report("llama-3.1-8b", ("h200",), max_model_len=200_000)
    assert any("more than the model's context of 131,072" in warning for warning in found.machines[0].warnings)
