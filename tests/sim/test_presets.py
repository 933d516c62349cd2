"""Engines by name: every pair works out, its figures follow from model and GPU, and each says what it rests on."""

from __future__ import annotations

import pytest

from kvroute.errors import ConfigError
from kvroute.sim.engine import seconds
from kvroute.sim.presets import PRESETS, engine_figures, limits_of
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset
from kvroute.sizing.speed import DECODE_EFFICIENCY, computes_in_8_bits, decode_step_s


@pytest.mark.parametrize("name", PRESETS)
def test_every_pair_holds_conversations_and_states_its_sources(name):
    """Each pair fits, decodes in milliseconds, and names model, GPU and assumptions."""
    figures = engine_figures(name)
    assert figures.kv_tokens >= figures.max_model_len
    assert 0.001 < seconds(figures.time.decode_fs(1, 1, 1000)) < 0.05
    assert {"model", "hardware", "efficiency", "limits", "blocks"} == figures.sources.keys()
    assert all(figures.sources.values())


def test_the_figures_are_sizings():
    """A step takes sizing's floor at its usual share, with the GPUs of the name."""
    figures = engine_figures("qwen3-32b@2xh100", block_size=64)
    floor = decode_step_s(preset("qwen3-32b"), gpu("h100"), batch=1, tokens=0, parallel=Parallel(tp=2))
    assert seconds(figures.time.decode_fs(1, 1, 0)) == pytest.approx(floor / DECODE_EFFICIENCY + 505e-6)
    assert (figures.block_size, figures.kv_tokens % 64) == (64, 0)


@pytest.mark.parametrize(
    ("name", "batched", "seqs"),
    [("h100", 8192, 1024), ("h200", 8192, 1024), ("b200", 16_384, 1024), ("a100-80gb", 2048, 256), ("l4", 2048, 256)],
)
def test_limits_are_the_servers_defaults(name, batched, seqs):
    """vLLM's server chooses its budget by the GPU's memory, and treats the A100 as a small one."""
    limits = limits_of(gpu(name))
    assert (limits.max_num_batched_tokens, limits.max_num_seqs, limits.async_scheduling) == (batched, seqs, True)


@pytest.mark.parametrize(
    ("name", "is_so"), [("deepseek-v3", True), ("llama-3.1-8b", False), ("gpt-oss-120b", False), ("kimi-k2", True)]
)
def test_only_8_bit_weights_are_computed_in_8_bits(name, is_so):
    """FP8 checkpoints use the GPU's 8-bit figure; 16-bit and 4-bit ones do not."""
    assert computes_in_8_bits(preset(name)) is is_so


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama-3.1-8b", "is not MODEL@GPU"),
        ("@h100", "is not MODEL@GPU"),
        ("llama-3.1-8b@warp", "no GPU is named 'warp'"),
        ("nobody@h100", "nobody"),
        ("llama-3.1-8b@0xh100", "number of GPUs must be from 1 to 64"),
        ("llama-3.3-70b@h100", "name more GPUs .llama-3.3-70b@2xh100."),
    ],
)
def test_a_name_that_leads_nowhere_says_what_would(name, said):
    """The error names the part that is wrong, and what to write instead."""
    with pytest.raises(ConfigError, match=said):
        engine_figures(name)


def test_cpu_memory_holds_blocks_and_gives_them_back_at_the_links_speed():
    """1.05 GB, the cache of 8,000 tokens of an 8B model, take 19 ms over PCIe 5, and half of it over two links."""
    figures = engine_figures("llama-3.1-8b@h100", block_size=16, cpu_bytes=64 * 10**9)
    assert figures.offload.num_blocks == 64 * 10**9 // (16 * 131_072)
    assert seconds(500 * figures.offload.block_copy_fs) == pytest.approx(0.019, rel=0.01)
    two = engine_figures("llama-3.1-8b@2xh100", cpu_bytes=10**9).offload
    assert two.block_copy_fs == pytest.approx(figures.offload.block_copy_fs / 2)
    assert engine_figures("llama-3.1-8b@h100").offload is None
    with pytest.raises(ConfigError, match="CPU memory"):
        engine_figures("llama-3.1-8b@h100", cpu_bytes=1000)


def test_a_gpu_whose_name_ends_in_x_is_understood():
    """The x of a count stands after a number at the beginning, and nowhere else."""
    assert engine_figures("llama-3.1-8b@mi300x").kv_tokens < engine_figures("llama-3.1-8b@2xmi300x").kv_tokens
