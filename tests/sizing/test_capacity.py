"""The arithmetic of KV caches, against published and measured figures."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import (
    Budget,
    Parallel,
    Share,
    as_plain_heads,
    cache_bytes,
    capacity_tokens,
    conversations,
    conversations_of_mix,
    conversations_of_mix_on,
    conversations_on,
    kv_bytes,
    kv_bytes_per_gpu,
    kv_bytes_per_token,
    kv_bytes_per_token_unbounded,
    mix_bytes,
    paged_waste,
    reserved_waste,
    shared_prefix_bytes,
    stages,
    tokens_on,
)
from kvroute.sizing.layers import Attention
from kvroute.sizing.model import Model, model_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.report import Wishes

GB, GIB, KIB = 10**9, 2**30, 1024
H100, H200 = 80 * GB, 141 * GB


def shape(layers, kv_heads, heads=32, head_dim=128):
    return model_of(
        {
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "torch_dtype": "bfloat16",
        }
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama-3-8b", 131_072),
        ("llama-3.1-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("llama-3.1-70b", 327_680),
        ("llama-3.3-70b", 327_680),
        ("llama-3.1-405b", 516_096),
        ("qwen2.5-7b", 57_344),
        ("qwen2.5-72b", 327_680),
        ("opt-13b", 819_200),
        ("deepseek-v3", 61 * 576 * 2),
        ("deepseek-v2", 60 * 576 * 2),
        ("gpt-oss-120b", 36_864),
        ("gpt-oss-20b", 24_576),
        ("gemma-3-27b", 81_920),
    ],
)
def test_bytes_of_a_token(name, expected):
    """Each published shape gives its known bytes per token, and an FP8 cache half of it."""
    model = preset(name)
    assert kv_bytes_per_token(model) == expected
    assert kv_bytes_per_token(model, 1) * 2 == expected


@pytest.mark.parametrize(
    ("layers", "kv_heads", "expected"), [(32, 32, 524_288), (32, 1, 16_384), (80, 64, 2_621_440), (32, 8, 131_072)]
)
def test_multi_head_grouped_and_multi_query(layers, kv_heads, expected):
    """Bytes follow KV heads; query heads never appear."""
    assert kv_bytes_per_token(shape(layers, kv_heads, heads=64)) == expected


def test_long_sessions_of_the_70b_shape():
    """32,768 tokens take 80 GiB with a KV head per query head and 10 GiB with eight."""
    assert kv_bytes(shape(80, 64, heads=64), 32_768) == 80 * GIB
    assert kv_bytes(preset("llama-3-70b"), 32_768) == 10 * GIB
    assert kv_bytes(preset("llama-3-70b"), 131_072) == 40 * GIB


def test_opt_13b_context():
    """One full context of OPT 13B, 2,048 tokens, is about 1.6 GB."""
    assert kv_bytes(preset("opt-13b"), 2_048) == pytest.approx(1.6 * GB, rel=0.05)


def test_latent_attention_against_plain_heads():
    """DeepSeek-V3 keeps 57 to 71 times less than the same heads kept plainly."""
    latent = preset("deepseek-v3")
    assert kv_bytes(latent, 131_072) == pytest.approx(8.6 * GIB, rel=0.005)
    assert kv_bytes_per_token(as_plain_heads(latent)) == 4_997_120
    assert kv_bytes_per_token(as_plain_heads(latent, value_dim=128)) == 3_997_696
    assert 4_997_120 // kv_bytes_per_token(latent) == 71
    assert round(3_997_696 / kv_bytes_per_token(latent)) == 57


@pytest.mark.parametrize(
    ("name", "full", "window", "size"),
    [("gpt-oss-120b", 18, 18, 128), ("gpt-oss-20b", 12, 12, 128), ("gemma-3-27b", 10, 52, 1024)],
)
def test_windows(name, full, window, size):
    """A window layer keeps at most its window, the others everything; without window support all keep everything."""
    model = preset(name)
    spans = [cache.window for cache in model.caches]
    assert (spans.count(None), spans.count(size)) == (full, window)
    per_layer = kv_bytes_per_token_unbounded(model) // len(model.layers)
    tokens = 10 * size
    assert kv_bytes(model, tokens) == per_layer * (full * tokens + window * size)
    assert kv_bytes(model, tokens, windows=False) == per_layer * (full + window) * tokens


def test_sink_tokens_are_kept_beside_the_window():
    """A StreamingLLM cache is bounded by its sink and its window."""
    layer = Attention(8, 128, 128, window=1_000, sink=4)
    model = Model(name="streaming", family="llama", layers=((layer,),) * 32)
    assert kv_bytes(model, 10**6) == kv_bytes(model, 1_004) == 1_004 * 131_072


@pytest.mark.parametrize(
    ("gpu", "tokens", "expected", "fp8"),
    [
        (H100, 8_000, 53, 106),
        (H100, 32_000, 13, 26),
        (H100, 128_000, 3, 6),
        (H200, 8_000, 105, 211),
        (H200, 32_000, 26, 52),
        (H200, 128_000, 6, 13),
    ],
)
def test_conversations_of_an_8b_model(gpu, tokens, expected, fp8):
    """Conversations of Llama 3 8B with 16 GB of weights at 90 % of one GPU."""
    budget = Budget(gpu_bytes=gpu, weights_bytes=16 * GB)
    assert conversations_on(budget, preset("llama-3-8b"), tokens) == expected
    assert conversations_on(budget, preset("llama-3-8b"), tokens, 1) == fp8


def test_what_the_weights_leave():
    """Of 72 GB and 126.9 GB that the engine may take, 16 GB of weights leave 56 and 110.9."""
    left = [Budget(gpu_bytes=gpu, weights_bytes=16 * GB).usable_bytes / GB for gpu in (H100, H200)]
    assert left == [pytest.approx(56), pytest.approx(110.9)]
    assert Wishes().utilisation == 0.92  # vLLM's default today


def test_a_model_that_loads_and_cannot_serve():
    """Llama 3 70B in FP8 leaves 2 GB on an H100, no conversation of 8,000 tokens; an H200 holds 21, or 43 in FP8."""
    small = Budget(gpu_bytes=H100, weights_bytes=70 * GB)
    assert small.usable_bytes == 2 * GB
    assert conversations_on(small, preset("llama-3-70b"), 8_000) == 0
    large = Budget(gpu_bytes=H200, weights_bytes=70 * GB)
    assert large.usable_bytes == pytest.approx(57 * GB, rel=0.01)
    assert conversations_on(large, preset("llama-3-70b"), 8_000) == 21
    assert conversations_on(large, preset("llama-3-70b"), 8_000, 1) == 43


def test_a_70b_model_on_two_gpus():
    """Two 80 GB GPUs with 70.6 GB of weights and 5 GB of activations leave about 68 GB: 207,000 tokens."""
    budget = Budget(
        gpu_bytes=H100, weights_bytes=round(70.6 * GB), working_bytes=round(2.5 * GB), parallel=Parallel(tp=2)
    )
    assert budget.usable_bytes // GB == 68
    model = preset("llama-3.1-70b")
    assert capacity_tokens(model, 68 * GB) // 1000 == 207
    assert conversations(model, 4_000, 68 * GB) == 51
    assert conversations(model, 32_768, 68 * GB) == 6
    assert conversations(model, 4_000, 68 * GB, 1) in (102, 103)
    assert capacity_tokens(model, 68 * GB, 1) // 1000 == 415


def test_many_users():
    """64 users take 671 GB at 32,000 tokens of a 70B shape and 67 GB at 8,000 tokens of an 8B one."""
    assert round(64 * kv_bytes(preset("llama-3-70b"), 32_000) / GB) == 671
    assert round(64 * kv_bytes(preset("llama-3-8b"), 8_000) / GB) == 67


def test_contiguous_reservation_against_paging():
    """Reserving 128,000 tokens a conversation admits 3 where paging of 8,000 used tokens admits 53."""
    budget = Budget(gpu_bytes=H100, weights_bytes=16 * GB)
    model = preset("llama-3-8b")
    assert (conversations_on(budget, model, 128_000), conversations_on(budget, model, 8_000)) == (3, 53)
    assert 0.6 <= reserved_waste(400, 1_024) <= 0.8
    assert paged_waste(400 + 1, 16) < 0.04


def test_the_peak_mix_weighs_by_bytes():
    """5 % of conversations of 64,000 tokens take eight times the cache of the others, each."""
    model = preset("llama-3-8b")
    mix = [Share(0.95, 8_000), Share(0.05, 64_000)]
    assert kv_bytes(model, 64_000) == 8 * kv_bytes(model, 8_000)
    assert mix_bytes(model, mix) == pytest.approx(1.35 * kv_bytes(model, 8_000))
    assert conversations_of_mix(model, mix, 56 * GB) == 39
    with pytest.raises(ConfigError, match="add up to 1"):
        mix_bytes(model, [Share(0.5, 8_000)])


def test_a_shared_system_prompt():
    """50 users of one 4,000-token system prompt take 26.2 GB unshared and 0.52 GB shared."""
    unshared, shared = shared_prefix_bytes(preset("llama-3-8b"), 50, 4_000)
    assert (round(unshared / GB, 1), round(shared / GB, 2)) == (26.2, 0.52)


@pytest.mark.parametrize(("tp", "heads"), [(1, 8), (2, 4), (4, 2), (8, 1), (16, 1)])
def test_tensor_parallelism_past_the_kv_heads_saves_nothing(tp, heads):
    """Each GPU keeps max(1, KV heads / TP) heads."""
    each = kv_bytes_per_gpu(preset("llama-3-70b"), 1_000, Parallel(tp=tp))
    assert each == heads * 80 * 2 * 128 * 2 * 1_000


def test_latent_attention_is_not_split_by_tensor_parallelism():
    """Eight GPUs each keep the whole latent cache, and a half each under decode context parallelism of two."""
    model = preset("deepseek-v3")
    assert kv_bytes_per_gpu(model, 1_000, Parallel(tp=8)) == kv_bytes(model, 1_000)
    assert kv_bytes_per_gpu(model, 1_000, Parallel(tp=8, dcp=2)) * 2 == kv_bytes(model, 1_000)


def test_pipeline_and_data_parallelism():
    """Pipeline stages split layers, the largest stage decides; data-parallel engines add up."""
    assert stages(80, 4) == [(0, 20), (20, 40), (40, 60), (60, 80)]
    assert [end - start for start, end in stages(61, 4)] == [15, 15, 16, 15]
    model = preset("llama-3-8b")
    assert kv_bytes_per_gpu(model, 100, Parallel(pp=2)) * 2 == kv_bytes(model, 100)
    one = Budget(gpu_bytes=H100, weights_bytes=16 * GB)
    two = Budget(gpu_bytes=H100, weights_bytes=16 * GB, parallel=Parallel(dp=2))
    assert conversations_on(two, model, 8_000) == 2 * conversations_on(one, model, 8_000)
    assert Parallel(tp=2, pp=3, dp=4, dcp=2).gpus == 24


@pytest.mark.parametrize(
    ("name", "parallel", "gpus"), [("deepseek-v3", Parallel(tp=16), 1), ("qwen3-235b-a22b", Parallel(tp=16), 4)]
)
def test_what_is_repeated_on_every_gpu_holds_no_more_tokens(name, parallel, gpus):
    """Sixteen GPUs hold the tokens of one with latent attention, and of four with four KV heads."""
    model = preset(name)
    budget = Budget(gpu_bytes=H200, weights_bytes=model.weights.total_bytes, parallel=parallel)
    expected = budget.per_gpu_bytes * gpus // kv_bytes_per_token(model)
    assert tokens_on(budget, model) == pytest.approx(expected, abs=1)
    assert tokens_on(budget, model, typical_tokens=8_000) == pytest.approx(expected, abs=1)
    mix = [Share(1.0, 8_000)]
    assert conversations_of_mix_on(budget, model, mix) == conversations_on(budget, model, 8_000) == expected // 8_000


def test_engines_side_by_side_hold_their_sum():
    """Two data-parallel engines hold twice the tokens and twice the mix of one."""
    one, two = (Budget(gpu_bytes=H100, weights_bytes=16 * GB, parallel=Parallel(dp=dp)) for dp in (1, 2))
    model, mix = preset("llama-3-8b"), [Share(0.95, 8_000), Share(0.05, 64_000)]
    assert tokens_on(two, model) == 2 * tokens_on(one, model)
    assert conversations_of_mix_on(two, model, mix) == 2 * conversations_of_mix_on(one, model, mix) == 78


def test_windows_leave_room_for_a_longer_conversation():
    """The longest conversation that fits takes the windows once, and one more token would not fit."""
    model = preset("gemma-3-27b")
    budget = Budget(gpu_bytes=H100, weights_bytes=model.weights.total_bytes)
    longest = tokens_on(budget, model)
    assert kv_bytes(model, longest) <= budget.per_gpu_bytes < kv_bytes(model, longest + 1)


@pytest.mark.parametrize("share", [float("nan"), -0.5, float("inf")])
def test_a_share_that_is_none_is_refused(share):
    """Neither a negative share nor one that is no number passes as a mix."""
    with pytest.raises(ConfigError, match="add up to 1"):
        mix_bytes(preset("llama-3-8b"), [Share(share, 8_000), Share(1 - share, 8_000)])


def test_nothing_left_is_no_conversation():
    """Weights larger than the GPU leave no room, and never a negative number of conversations."""
    budget = Budget(gpu_bytes=24 * GB, weights_bytes=100 * GB)
    assert budget.usable_bytes < 0
    assert conversations_on(budget, preset("llama-3-8b"), 8_000) == 0
    assert capacity_tokens(preset("llama-3-8b"), budget.usable_bytes) == 0
    assert tokens_on(budget, preset("llama-3-8b")) == 0


def test_unknown_cache_dtype_is_refused():
    """The message lists the known ones."""
    with pytest.raises(ConfigError, match="fp8"):
        cache_bytes("int3", preset("llama-3-8b"))


@settings(deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(0, 300_000), st.integers(0, 300_000))
def test_longer_conversations_never_take_less(name, one, other):
    """Bytes grow with tokens, windows never cost more than no windows, and growth is bounded by the full figure."""
    model = preset(name)
    short, long = sorted((one, other))
    assert kv_bytes(model, short) <= kv_bytes(model, long) <= kv_bytes(model, long, windows=False)
    begun = sum(cache.bytes_per_token(2) for cache in model.caches if cache.stride > 1)  # a vector for several tokens
    grown = kv_bytes(model, long) - kv_bytes(model, short)
    assert grown <= (long - short) * kv_bytes_per_token_unbounded(model) + begun


@settings(deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 200_000), st.integers(0, 10**12))
def test_what_fits_does_fit(name, tokens, usable):
    """As many conversations as fit take no more than there is, and one more would."""
    model = preset(name)
    count = conversations(model, tokens, usable)
    assert count * kv_bytes(model, tokens) <= usable < (count + 1) * kv_bytes(model, tokens)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 16))
def test_stages_cover_every_layer_once(layers, pp):
    """Stages are consecutive and differ by at most one layer."""
    found = stages(layers, pp)
    assert found[0][0] == 0
    assert found[-1][1] == layers
    assert all(left[1] == right[0] for left, right in pairwise(found))
    sizes = [end - start for start, end in found]
    assert max(sizes) - min(sizes) <= 1
