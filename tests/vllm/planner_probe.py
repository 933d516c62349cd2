"""Asks vLLM's own planner, in vLLM's own environment: cases as JSON on stdin, its plans as JSON on stdout.

Head counts, head sizes, layer types and state shapes are read by vLLM and transformers from a config.json written
from the case, so nothing of kvroute takes part. Only the layers' specs are put together here, as the layers of the
models do it (a real model of these sizes does not fit a test machine).
"""

import json
import os
import sys
import tempfile
from pathlib import Path

os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import torch
from vllm.config import CacheConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.config.model import ModelConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.core.kv_cache_utils import get_kv_cache_capacity, get_kv_cache_configs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

STATES = {"linear_attention", "mamba"}


class Backend:
    """What the platform asks of an attention backend when it aligns block sizes: FlashAttention's answers."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [MultipleOf(16)]

    @staticmethod
    def customize_spec(spec):
        return spec


class Alignment(Platform):
    """The platform's own alignment of hybrid block sizes, with that one backend."""

    @classmethod
    def _find_non_ssm_backends(cls, vllm_config):
        return [Backend]


def vllm_config_of(case, directory):
    Path(directory, "config.json").write_text(json.dumps(case["config"]))
    model = ModelConfig(
        model=directory, skip_tokenizer_init=True, max_model_len=case["max_model_len"], dtype="bfloat16"
    )
    cache = CacheConfig(block_size=case["block_size"], cache_dtype=case["cache_dtype"], enable_prefix_caching=True)
    cache.kv_cache_layout = "LBNHC"
    config = VllmConfig(
        cache_config=cache,
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=case["batched_tokens"],
            max_model_len=case["max_model_len"],
            is_encoder_decoder=False,
            async_scheduling=True,
        ),
        parallel_config=ParallelConfig(),
    )
    config.model_config = model
    parallel = config.parallel_config
    parallel.tensor_parallel_size, parallel.pipeline_parallel_size = case["tp"], case["pp"]
    parallel.decode_context_parallel_size = case["dcp"]
    config.scheduler_config.async_scheduling = True  # the CPU platform switches it off
    config.scheduler_config.disable_hybrid_kv_cache_manager = not case["hybrid"]
    if model.is_hybrid:
        cache.mamba_cache_mode = "align"
        architecture = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)[0]
        # The CPU platform keeps recurrences in 32 bits; a GPU engine does as the model's configuration says.
        cache.mamba_ssm_cache_dtype = getattr(model.hf_text_config, "mamba_ssm_cache_dtype", None) or "auto"
        Alignment._align_hybrid_block_size(config, Backend)
        return config, architecture
    return config, None


def specs_of(config, architecture):
    """One spec for each layer that keeps something, as the model's layers would give."""
    model, cache, parallel = config.model_config, config.cache_config, config.parallel_config
    text = model.hf_text_config
    dtype = model.dtype if cache.cache_dtype == "auto" else STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype]
    common = {
        "block_size": cache.block_size,
        "num_kv_heads": model.get_num_kv_heads(parallel),
        "head_size": model.get_head_size(),
        "dtype": dtype,
    }
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    index = getattr(text, "index_head_dim", None)
    specs = {}
    for number, kind in enumerate(types):
        name = f"layers.{number}"
        if kind in STATES:
            specs[name] = MambaSpec(
                shapes=architecture.get_mamba_state_shape_from_config(config),
                dtypes=architecture.get_mamba_state_dtype_from_config(config),
                block_size=cache.mamba_block_size or cache.block_size,
                page_size_padded=cache.mamba_page_size_padded,
                mamba_cache_mode=cache.mamba_cache_mode,
            )
        elif kind == "sliding_attention":
            specs[name] = SlidingWindowSpec(sliding_window=text.sliding_window, **common)
        elif kind == "chunked_attention":
            specs[name] = ChunkedLocalAttentionSpec(attention_chunk_size=text.attention_chunk_size, **common)
        elif index and model.use_mla:
            packed = {"state_content_bytes": 656} if cache.cache_dtype == "fp8" else {}  # FlashMLA's fp8_ds_mla
            specs[name] = MLAAttentionSpec(**common, **packed)
            specs[f"{name}.indexer"] = MLAAttentionSpec(
                block_size=cache.block_size,
                num_kv_heads=1,
                head_size=index + index // 128 * 4,
                dtype=torch.uint8,
                cache_role=SparseCacheRole.INDEXER,
            )
        elif kind in ("full_attention", "attention"):
            specs[name] = MLAAttentionSpec(**common) if model.use_mla else FullAttentionSpec(**common)
    return specs, len(types)


def answer(case):
    with tempfile.TemporaryDirectory() as directory:
        config, architecture = vllm_config_of(case, directory)
        specs, layers = specs_of(config, architecture)
        workers = []
        for rank in range(case["pp"]):
            start, end = get_pp_indices(layers, rank, case["pp"])
            workers.append({name: spec for name, spec in specs.items() if start <= int(name.split(".")[1]) < end})
        plans = get_kv_cache_configs(config, workers, [case["available"]] * case["pp"])
        tokens, concurrency = get_kv_cache_capacity(config, plans[0])
        groups = plans[0].kv_cache_groups
        return {
            "blocks": plans[0].num_blocks,
            "groups": len(groups),
            "block_size": config.cache_config.block_size,
            "tokens": tokens,
            "concurrency": concurrency,
        }


if __name__ == "__main__":
    print(json.dumps([answer(case) for case in json.load(sys.stdin)]))
