"""Floors of decode, prefill and copies."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import Parallel, kv_bytes
from kvroute.sizing.hardware import gpu, hardware_of
from kvroute.sizing.model import model_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.speed import (
    Tier,
    computes_in_8_bits,
    copy_pays_from_tokens,
    copy_s,
    decode_step_s,
    prefill_operations,
    prefill_s,
    seeds,
    tiers,
)

GB = 10**9


def llama_8b():
    """Llama 3 8B with its weights at a round 16 GB."""
    model = preset("llama-3-8b")
    return structs.replace(model, weights=model.weights.resized(16 * GB))


@pytest.mark.parametrize(
    ("batch", "tokens", "step_ms", "per_user"),
    [(1, 0, 4.78, 209), (16, 8_000, 9.78, 102), (32, 8_000, 14.8, 68), (16, 32_000, 24.8, 40), (1, 128_000, 9.78, 102)],
)
def test_decode_floor(batch, tokens, step_ms, per_user):
    """A step reads the weights once and every running conversation's cache; users see its inverse."""
    step = decode_step_s(llama_8b(), gpu("h100"), batch=batch, tokens=tokens)
    assert step * 1e3 == pytest.approx(step_ms, rel=0.002)
    assert round(1 / step) == per_user


def test_recompute_floor():
    """8,000 tokens of an 8B model take 0.13 s at an H100's peak, before the quadratic term."""
    model = preset("llama-3-8b")
    assert prefill_s(model, gpu("h100"), 8_000, quadratic=False) == pytest.approx(0.13, rel=0.01)
    linear, attention = prefill_operations(model, 8_000)
    assert attention == 32 * 2 * 32 * 256 * (8_000 * 8_001 / 2)
    assert prefill_s(model, gpu("h100"), 8_000) == pytest.approx((linear + attention) / 989e12)


def test_copying_back_from_cpu_memory():
    """8,000 tokens of 8B are 1.05 GB: about 19 ms at 55 GB/s, and about ten times less than a real recompute."""
    model = preset("llama-3-8b")
    cpu = tiers(gpu("h100"))[0]
    assert kv_bytes(model, 8_000) / GB == pytest.approx(1.05, rel=0.005)
    assert copy_s(model, 8_000, cpu) == pytest.approx(0.019, rel=0.01)
    assert prefill_s(model, gpu("h100"), 8_000, efficiency=0.7) / copy_s(model, 8_000, cpu) == pytest.approx(
        10, rel=0.2
    )


def test_hardware_facts():
    """H100 and H200 as their data sheets say."""
    h100, h200 = gpu("h100"), gpu("H200")
    assert (h100.memory_bytes, h100.bandwidth_bytes_s, h100.flops) == (80 * GB, 3_350 * GB, 989 * 10**12)
    assert (h200.memory_bytes, h200.bandwidth_bytes_s, h200.flops) == (141 * GB, 4_800 * GB, h100.flops)


def test_a_copy_with_latency_pays_from_some_length():
    """The length is where both take the same time; a slow tier of a small cache never pays, a fast one at once."""
    model, h100 = preset("llama-3-8b"), gpu("h100")
    slow = Tier("far", GB, 0.1)
    turn = copy_pays_from_tokens(model, h100, slow)
    assert copy_s(model, turn, slow) < prefill_s(model, h100, turn)
    assert copy_s(model, turn - 1, slow) >= prefill_s(model, h100, turn - 1)
    assert copy_pays_from_tokens(model, h100, tiers(h100)[0]) == 1
    assert copy_pays_from_tokens(model, h100, Tier("snail", 1_000)) is None


def test_each_gpu_brings_its_part_back_from_cpu_memory():
    """Four GPUs copy four parts at once over their own links; a disk is shared. Latent vectors are copied by all."""
    cpu, disk, _ = tiers(gpu("h100"))
    model, four = preset("llama-3-70b"), Parallel(tp=4)
    assert copy_s(model, 8_000, cpu, parallel=four) == pytest.approx(copy_s(model, 8_000, cpu) / 4)
    assert copy_s(model, 8_000, disk, parallel=four) == copy_s(model, 8_000, disk)
    latent = preset("deepseek-v3")
    assert copy_s(latent, 8_000, cpu, parallel=four) == copy_s(latent, 8_000, cpu)


def test_eight_bit_weights_are_computed_in_eight_bits():
    """An FP8 checkpoint's first rates rest on the GPU's 8-bit compute, a 4-bit one's on its 16-bit compute."""
    h100 = gpu("h100")
    assert [computes_in_8_bits(preset(name)) for name in ("deepseek-v3", "llama-3-8b", "gpt-oss-20b")] == [
        True,
        False,
        False,
    ]
    floor = prefill_s(preset("deepseek-v3"), h100, 8_000, eight_bit=True, efficiency=0.5)
    assert seeds(preset("deepseek-v3"), h100).prefill_tokens_s == pytest.approx(8_000 / floor)


def test_a_further_sequence_costs_what_it_reads_and_computes():
    """Of a dense model only its arithmetic; of one with experts, the weights that no other sequence needed."""
    h100 = gpu("h100")
    model = preset("llama-3-8b")
    token = prefill_s(model, h100, 1, efficiency=0.5)
    assert seeds(model, h100).step_s_per_sequence == pytest.approx(token)
    sparse = seeds(preset("qwen3-30b-a3b"), h100)
    assert sparse.step_s_per_sequence > 10 * prefill_s(preset("qwen3-30b-a3b"), h100, 1, efficiency=0.5)


def test_a_cached_prefix_leaves_the_rest():
    """Prefilling in two parts costs what one part does, and a cached part is not paid again."""
    model = preset("gpt-oss-20b")
    whole = sum(prefill_operations(model, 9_000))
    parts = sum(prefill_operations(model, 4_000)) + sum(prefill_operations(model, 5_000, 4_000))
    assert parts == pytest.approx(whole)


def test_experts_are_read_as_a_batch_touches_them():
    """One sequence reads the chosen experts, a large batch all of them."""
    weights = preset("qwen3-235b-a22b").weights
    assert weights.read_bytes(1) == pytest.approx(2 * weights.active_parameters, rel=0.01)
    assert weights.read_bytes(1_000) == pytest.approx(weights.total_bytes, rel=0.001)
    assert preset("llama-3-8b").weights.read_bytes(7) == preset("llama-3-8b").weights.total_bytes


def test_seeds_describe_a_step():
    """A step at the seeds' rates is the decode floor over the usual efficiency."""
    model, h100 = preset("llama-3-8b"), gpu("h100")
    rates = seeds(model, h100)
    step = rates.step_s + 16 * 8_000 * rates.step_s_per_token
    assert step == pytest.approx(decode_step_s(model, h100, batch=16, tokens=8_000, efficiency=0.7))
    assert rates.prefill_tokens_s == pytest.approx(8_000 / prefill_s(model, h100, 8_000, efficiency=0.5))
    assert seeds(model, h100, parallel=Parallel(tp=2)).step_s == pytest.approx(rates.step_s / 2)


def test_what_is_not_known_is_asked_for():
    """Speed needs bandwidth, compute and weights, and says which is missing."""
    model, bare = preset("llama-3-8b"), hardware_of({"memory_gb": 80})
    with pytest.raises(ConfigError, match="--gpu-bandwidth"):
        decode_step_s(model, bare, batch=1, tokens=1)
    with pytest.raises(ConfigError, match="--gpu-tflops"):
        prefill_s(model, bare, 1)
    unknown = model_of({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8})
    with pytest.raises(ConfigError, match="--weights"):
        decode_step_s(unknown, gpu("h100"), batch=1, tokens=1)


@settings(deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.integers(1, 64), st.integers(0, 200_000))
def test_floors_grow_with_work(name, batch, tokens):
    """More sequences or more history never make a step faster, more tokens never a prefill."""
    model, h100 = preset(name), gpu("h100")
    step = decode_step_s(model, h100, batch=batch, tokens=tokens)
    assert step <= decode_step_s(model, h100, batch=batch + 1, tokens=tokens)
    assert step <= decode_step_s(model, h100, batch=batch, tokens=tokens + 1)
    assert prefill_s(model, h100, tokens) < prefill_s(model, h100, tokens + 1)


def test_sparse_attention_reads_what_its_indexer_chooses():
    """Past the chosen tokens a step reads only the indexer's keys, and a prefill's pairs grow with its small heads."""
    model, h200 = preset("deepseek-v3.2"), gpu("h200")
    short, long = (decode_step_s(model, h200, batch=1, tokens=tokens) for tokens in (2_048, 102_048))
    assert (long - short) * h200.bandwidth_bytes_s == pytest.approx(61 * 132 * 100_000)
    _, sparse = prefill_operations(model, 128_000)
    _, full = prefill_operations(preset("deepseek-v3"), 128_000)
    assert sparse < full / 3
    assert prefill_operations(model, 2_000)[1] > prefill_operations(preset("deepseek-v3"), 2_000)[1]


def test_a_step_reads_what_a_conversation_keeps():
    """Without an indexer, what a step reads of a conversation is all that it keeps."""
    h100 = gpu("h100")
    for name in sorted(PRESETS):
        model = preset(name)
        if any(getattr(cache, "chosen", None) for cache in model.caches):
            continue
        empty, full = (decode_step_s(model, h100, batch=1, tokens=tokens) for tokens in (0, 12_800))
        kept = kv_bytes(model, 12_800) - kv_bytes(model, 0)
        assert (full - empty) * h100.bandwidth_bytes_s == pytest.approx(kept)
