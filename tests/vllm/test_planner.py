"""Our plan of a cache against vLLM's own planner, block for block."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from kvroute.sizing.capacity import Parallel
from kvroute.sizing.planner import Settings, plan
from kvroute.sizing.presets import PRESETS, preset
from tests.vllm.engines import venv

PROBE = Path(__file__).with_name("planner_probe.py")
GIB = 2**30
DTYPE_BYTES = {"auto": 2, "fp8": 1}
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_next": "Qwen3NextForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "deepseek_v32": "DeepseekV32ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "mistral": "MistralForCausalLM",
    "cohere2": "Cohere2ForCausalLM",
    "nemotron_h": "NemotronHForCausalLM",
    "jamba": "JambaForCausalLM",
}


def case(name, **changes):
    """One engine: a published shape and settings that differ from 10 GiB, one GPU and 131,072 tokens."""
    usual = {"max_model_len": 131_072, "block_size": 16, "cache_dtype": "auto", "batched_tokens": 8_192}
    spread = {"tp": 1, "pp": 1, "dcp": 1, "hybrid": True, "available": 20 * GIB}
    return {"name": name, **usual, **spread, **changes}


CASES = {
    "full attention": case("llama-3.1-8b"),
    "full attention, FP8 cache": case("llama-3.1-8b", cache_dtype="fp8"),
    "GQA over 8 GPUs": case("llama-3.1-70b", tp=8),
    "GQA past its KV heads": case("qwen2.5-7b", tp=8, max_model_len=32_768),
    "GQA in pipeline stages": case("llama-3.1-405b", tp=8, pp=4),
    "uneven pipeline stages": case("qwen3-235b-a22b", tp=8, pp=4, max_model_len=40_960),
    "larger blocks": case("mistral-7b", block_size=64, max_model_len=32_768),
    "latent attention": case("deepseek-v3", tp=8),
    "latent attention, FP8 cache": case("deepseek-v3", tp=8, cache_dtype="fp8"),
    "latent attention, split context": case("deepseek-v2-lite", tp=4, dcp=4),
    "sparse latent attention": case("deepseek-v3.2", tp=8),
    "sparse latent attention, FP8 cache": case("deepseek-v3.2", tp=8, cache_dtype="fp8"),
    "split context": case("llama-3.1-8b", tp=8, dcp=4),
    "half windows": case("gpt-oss-20b"),
    "half windows over 8 GPUs": case("gpt-oss-120b", tp=8),
    "five windows in six": case("gemma-3-27b"),
    "five windows in six, left over": case("gemma-3-4b", max_model_len=65_536),
    "windows kept whole": case("gemma-3-27b", hybrid=False, max_model_len=32_768),
    "half windows, short context": case("gemma-2-9b", max_model_len=8_192, batched_tokens=2_048),
    "windows in pipeline stages": case("gemma-3-27b", pp=2),
    "windows in three of four": case("command-r7b", tp=2),
    "chunks in three of four": case("llama-4-scout", tp=4),
    "linear attention": case("qwen3-next-80b", tp=2),
    "Mamba 2": case("nemotron-nano-9b-v2"),
    "Mamba 2 with experts": case("nemotron-3-nano-30b", tp=2),
    "Mamba 2, FP8 cache": case("nemotron-nano-9b-v2", cache_dtype="fp8", tp=2),
    "Mamba": case("jamba-1.5-mini", tp=2),
}


def asked(one):
    """The probe's form of a case: the shape as a config.json."""
    config = dict(PRESETS[one["name"]].config)
    return {**one, "config": {**config, "architectures": [ARCHITECTURES[config["model_type"]]]}}


@pytest.fixture(scope="session")
def answers():
    """What vLLM plans for every case, from one run of its environment."""
    done = subprocess.run(
        [venv() / "bin" / "python", PROBE],
        input=json.dumps([asked(one) for one in CASES.values()]),
        capture_output=True,
        text=True,
        timeout=1_200,
        check=False,
        env={**os.environ, "VLLM_TARGET_DEVICE": "cpu", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-4_000:]
    return dict(zip(CASES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.parametrize("title", CASES)
def test_the_plan_is_vllms(answers, title):
    """Blocks, groups, block size, tokens and concurrency are the ones that vLLM computes."""
    one = CASES[title]
    settings = Settings(
        max_model_len=one["max_model_len"],
        block_size=one["block_size"],
        element_bytes=DTYPE_BYTES[one["cache_dtype"]],
        parallel=Parallel(tp=one["tp"], pp=one["pp"], dcp=one["dcp"]),
        batched_tokens=one["batched_tokens"],
        hybrid=one["hybrid"],
    )
    ours = plan(preset(one["name"]), one["available"], settings)
    assert answers[title] == {
        "blocks": ours.blocks,
        "groups": len(ours.groups),
        "block_size": ours.block_size,
        "tokens": ours.tokens,
        "concurrency": pytest.approx(ours.max_concurrency),
    }
