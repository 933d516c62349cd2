"""Shapes of published models by name, so that `kvroute size llama-3.1-8b` needs no file.

Each entry holds the fields of the `config.json` that its repository on the Hugging Face hub publishes (named as the
source) that decide cache and weights, and is read by the same code as a file. Parameter counts that follow from these
shapes are compared with the published totals in the tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from kvroute.errors import ConfigError
from kvroute.sizing.fields import shown
from kvroute.sizing.model import Model, model_of

Config = Mapping[str, Any]
NEMOTRON_NANO_9B_V2 = "M-M-M-MM-M-M-M*-M-M-M*-M-M-M-M*-M-M-M-M*-M-MM-M-M-M-M-M-"
NEMOTRON_3_NANO = "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME"


class Preset(Struct, frozen=True):
    """One published model."""

    source: str  # its repository on the Hugging Face hub
    config: Config


def _dense(
    family: str, layers: int, hidden: int, heads: tuple[int, int], feed: int, vocab: int, context: int, **more: Any
) -> Config:
    """A decoder with `heads` = (query heads, KV heads)."""
    return {
        "model_type": family,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "intermediate_size": feed,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        **more,
    }


def _llama(layers: int, hidden: int, heads: tuple[int, int], feed: int, context: int = 131_072, **more: Any) -> Config:
    return _dense("llama", layers, hidden, heads, feed, 128_256, context, **more)


def _llama4(experts: int, step: int, context: int) -> Config:
    return _dense(
        "llama4_text",
        48,
        5120,
        (40, 8),
        8192,
        202_048,
        context,
        head_dim=128,
        intermediate_size_mlp=16_384,
        num_local_experts=experts,
        num_experts_per_tok=1,
        interleave_moe_layer_step=step,
        attention_chunk_size=8192,
        no_rope_layer_interval=4,
    )


def _qwen3(family: str, layers: int, hidden: int, heads: tuple[int, int], feed: int, **more: Any) -> Config:
    return _dense(family, layers, hidden, heads, feed, 151_936, more.pop("context", 40_960), head_dim=128, **more)


def _moe(size: int, experts: int, chosen: int, **more: Any) -> Config:
    return {"moe_intermediate_size": size, "num_experts": experts, "num_experts_per_tok": chosen, **more}


def _delta_net(value_heads: int) -> Config:
    return {
        "head_dim": 256,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "linear_conv_kernel_dim": 4,
        "linear_num_key_heads": 16,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
    }


def _latent(rank: int | None = 1536, nope: int = 128, value: int = 128) -> Config:
    return {
        "q_lora_rank": rank,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": nope,
        "v_head_dim": value,
    }


def _routed(experts: int, chosen: int, size: int, first_dense: int, shared: int = 1) -> Config:
    return {
        "n_routed_experts": experts,
        "num_experts_per_tok": chosen,
        "moe_intermediate_size": size,
        "first_k_dense_replace": first_dense,
        "n_shared_experts": shared,
    }


def _indexer(heads: int) -> Config:
    """The indexer of DeepSeek's sparse attention."""
    return {"index_head_dim": 128, "index_n_heads": heads, "index_topk": 2048}


FP8: Config = {"quantization_config": {"quant_method": "fp8"}}
_V3: Config = {**_dense("deepseek_v3", 61, 7168, (128, 128), 18_432, 129_280, 163_840), **_latent(), **FP8}
_V3_EXPERTS = _routed(256, 8, 2048, 3)


def _compressed(
    layers: int, hidden: int, heads: int, first: tuple[int, int], low: tuple[int, int], chosen: int, experts: Config
) -> Config:
    """DeepSeek V4: `first` two compression ratios, then 4 and 128 in turn; `low` = (query rank, output groups)."""
    return {
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": low[0],
        "o_lora_rank": 1024,
        "o_groups": low[1],
        "index_head_dim": 128,
        "index_n_heads": 64,
        "index_topk": chosen,
        "sliding_window": 128,
        "compress_ratios": [*first, *([4, 128] * layers)[: layers - 2]],
        "vocab_size": 129_280,
        "max_position_embeddings": 1_048_576,
        "expert_dtype": "fp4",
        **experts,
        **FP8,
    }


def _gpt_oss(layers: int, experts: int) -> Config:
    return _dense(
        "gpt_oss",
        layers,
        2880,
        (64, 8),
        2880,
        201_088,
        131_072,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * (layers // 2),
        num_local_experts=experts,
        num_experts_per_tok=4,
        quantization_config={"quant_method": "mxfp4"},
    )


def _gemma2(layers: int, hidden: int, heads: tuple[int, int], head: int, feed: int) -> Config:
    more = {"head_dim": head, "sliding_window": 4096, "sliding_window_pattern": 2, "tie_word_embeddings": True}
    return _dense("gemma2", layers, hidden, heads, feed, 256_000, 8192, **more)


def _gemma3(layers: int, hidden: int, heads: tuple[int, int], head: int, feed: int) -> Config:
    more = {"head_dim": head, "sliding_window": 1024, "sliding_window_pattern": 6, "tie_word_embeddings": True}
    return _dense("gemma3_text", layers, hidden, heads, feed, 262_208, 131_072, **more)


def _cohere(family: str, layers: int, hidden: int, heads: tuple[int, int], feed: int, **more: Any) -> Config:
    context = more.pop("context", 131_072)
    return _dense(family, layers, hidden, heads, feed, 256_000, context, tie_word_embeddings=True, **more)


_COHERE_WINDOW: Config = {"sliding_window": 4096, "sliding_window_pattern": 4}


def _nemotron(pattern: str, hidden: int, heads: tuple[int, int], feed: int, **more: Any) -> Config:
    common = {"head_dim": 128, "ssm_state_size": 128, "conv_kernel": 4, "n_groups": 8}
    context = more.pop("context", 131_072)
    return _dense(
        "nemotron_h",
        len(pattern),
        hidden,
        heads,
        feed,
        131_072,
        context,
        hybrid_override_pattern=pattern,
        **common,
        **more,
    )


PRESETS: dict[str, Preset] = {
    "llama-3-8b": Preset("meta-llama/Meta-Llama-3-8B", _llama(32, 4096, (32, 8), 14_336, 8192)),
    "llama-3-70b": Preset("meta-llama/Meta-Llama-3-70B", _llama(80, 8192, (64, 8), 28_672, 8192)),
    "llama-3.1-8b": Preset("meta-llama/Llama-3.1-8B", _llama(32, 4096, (32, 8), 14_336)),
    "llama-3.1-70b": Preset("meta-llama/Llama-3.1-70B", _llama(80, 8192, (64, 8), 28_672)),
    "llama-3.1-405b": Preset("meta-llama/Llama-3.1-405B", _llama(126, 16_384, (128, 8), 53_248)),
    "llama-3.2-1b": Preset(
        "meta-llama/Llama-3.2-1B", _llama(16, 2048, (32, 8), 8192, head_dim=64, tie_word_embeddings=True)
    ),
    "llama-3.2-3b": Preset(
        "meta-llama/Llama-3.2-3B", _llama(28, 3072, (24, 8), 8192, head_dim=128, tie_word_embeddings=True)
    ),
    "llama-3.3-70b": Preset("meta-llama/Llama-3.3-70B-Instruct", _llama(80, 8192, (64, 8), 28_672)),
    "llama-4-scout": Preset("meta-llama/Llama-4-Scout-17B-16E", _llama4(16, 1, 10_485_760)),
    "llama-4-maverick": Preset("meta-llama/Llama-4-Maverick-17B-128E", _llama4(128, 2, 1_048_576)),
    "qwen2.5-7b": Preset("Qwen/Qwen2.5-7B", _dense("qwen2", 28, 3584, (28, 4), 18_944, 152_064, 131_072)),
    "qwen2.5-32b": Preset("Qwen/Qwen2.5-32B", _dense("qwen2", 64, 5120, (40, 8), 27_648, 152_064, 131_072)),
    "qwen2.5-72b": Preset("Qwen/Qwen2.5-72B", _dense("qwen2", 80, 8192, (64, 8), 29_568, 152_064, 131_072)),
    "qwen3-8b": Preset("Qwen/Qwen3-8B", _qwen3("qwen3", 36, 4096, (32, 8), 12_288)),
    "qwen3-32b": Preset("Qwen/Qwen3-32B", _qwen3("qwen3", 64, 5120, (64, 8), 25_600)),
    "qwen3-30b-a3b": Preset("Qwen/Qwen3-30B-A3B", _qwen3("qwen3_moe", 48, 2048, (32, 4), 6144, **_moe(768, 128, 8))),
    "qwen3-235b-a22b": Preset(
        "Qwen/Qwen3-235B-A22B", _qwen3("qwen3_moe", 94, 4096, (64, 4), 12_288, **_moe(1536, 128, 8))
    ),
    "qwen3-coder-480b": Preset(
        "Qwen/Qwen3-Coder-480B-A35B-Instruct",
        _qwen3("qwen3_moe", 62, 6144, (96, 8), 8192, context=262_144, **_moe(2560, 160, 8)),
    ),
    "qwen3-next-80b": Preset(
        "Qwen/Qwen3-Next-80B-A3B-Instruct",
        {
            **_dense("qwen3_next", 48, 2048, (16, 2), 5120, 151_936, 262_144),
            **_delta_net(32),
            **_moe(512, 512, 10, shared_expert_intermediate_size=512),
        },
    ),
    "qwen3.5-397b-a17b": Preset(
        "Qwen/Qwen3.5-397B-A17B",
        {
            **_dense("qwen3_5_moe_text", 60, 4096, (32, 2), 1024, 248_320, 262_144),
            **_delta_net(64),
            "mamba_ssm_dtype": "float32",
            **_moe(1024, 512, 10, shared_expert_intermediate_size=1024),
        },
    ),
    "mistral-7b": Preset("mistralai/Mistral-7B-v0.3", _dense("mistral", 32, 4096, (32, 8), 14_336, 32_768, 32_768)),
    "mistral-small-24b": Preset(
        "mistralai/Mistral-Small-24B-Instruct-2501",
        _dense("mistral", 40, 5120, (32, 8), 32_768, 131_072, 32_768, head_dim=128),
    ),
    "mistral-large-123b": Preset(
        "mistralai/Mistral-Large-Instruct-2407", _dense("mistral", 88, 12_288, (96, 8), 28_672, 32_768, 131_072)
    ),
    "mixtral-8x7b": Preset(
        "mistralai/Mixtral-8x7B-v0.1",
        _dense("mixtral", 32, 4096, (32, 8), 14_336, 32_000, 32_768, num_local_experts=8, num_experts_per_tok=2),
    ),
    "mixtral-8x22b": Preset(
        "mistralai/Mixtral-8x22B-v0.1",
        _dense("mixtral", 56, 6144, (48, 8), 16_384, 32_000, 65_536, num_local_experts=8, num_experts_per_tok=2),
    ),
    "gemma-2-9b": Preset("google/gemma-2-9b", _gemma2(42, 3584, (16, 8), 256, 14_336)),
    "gemma-2-27b": Preset("google/gemma-2-27b", _gemma2(46, 4608, (32, 16), 128, 36_864)),
    "gemma-3-4b": Preset("google/gemma-3-4b-it", _gemma3(34, 2560, (8, 4), 256, 10_240)),
    "gemma-3-12b": Preset("google/gemma-3-12b-it", _gemma3(48, 3840, (16, 8), 256, 15_360)),
    "gemma-3-27b": Preset("google/gemma-3-27b-it", _gemma3(62, 5376, (32, 16), 128, 21_504)),
    "phi-4": Preset("microsoft/phi-4", _dense("phi3", 40, 5120, (40, 10), 17_920, 100_352, 16_384)),
    "phi-3-mini-4k": Preset(
        "microsoft/Phi-3-mini-4k-instruct",
        _dense("phi3", 32, 3072, (32, 32), 8192, 32_064, 4096, sliding_window=2047),
    ),
    "gpt-oss-20b": Preset("openai/gpt-oss-20b", _gpt_oss(24, 32)),
    "gpt-oss-120b": Preset("openai/gpt-oss-120b", _gpt_oss(36, 128)),
    "deepseek-v2": Preset(
        "deepseek-ai/DeepSeek-V2",
        {
            **_dense("deepseek_v2", 60, 5120, (128, 128), 12_288, 102_400, 163_840),
            **_latent(),
            **_routed(160, 6, 1536, 1, shared=2),
        },
    ),
    "deepseek-v2-lite": Preset(
        "deepseek-ai/DeepSeek-V2-Lite",
        {
            **_dense("deepseek_v2", 27, 2048, (16, 16), 10_944, 102_400, 163_840),
            **_latent(None),
            **_routed(64, 6, 1408, 1, shared=2),
        },
    ),
    "deepseek-v3": Preset("deepseek-ai/DeepSeek-V3", {**_V3, **_V3_EXPERTS}),
    "deepseek-r1": Preset("deepseek-ai/DeepSeek-R1", {**_V3, **_V3_EXPERTS}),
    "deepseek-v3.2": Preset(
        "deepseek-ai/DeepSeek-V3.2", {**_V3, **_V3_EXPERTS, "model_type": "deepseek_v32", **_indexer(64)}
    ),
    "deepseek-v4-flash": Preset(
        "deepseek-ai/DeepSeek-V4-Flash", _compressed(43, 4096, 64, (0, 0), (1024, 8), 512, _routed(256, 6, 2048, 0))
    ),
    "deepseek-v4-pro": Preset(
        "deepseek-ai/DeepSeek-V4-Pro",
        _compressed(61, 7168, 128, (128, 128), (1536, 16), 1024, _routed(384, 6, 3072, 0)),
    ),
    "kimi-k2": Preset(
        "moonshotai/Kimi-K2-Instruct",
        {
            **_dense("kimi_k2", 61, 7168, (64, 64), 18_432, 163_840, 131_072),
            **_latent(),
            **_routed(384, 8, 2048, 1),
            **FP8,
        },
    ),
    "glm-4.5": Preset(
        "zai-org/GLM-4.5",
        {
            **_dense("glm4_moe", 92, 5120, (96, 8), 12_288, 151_552, 131_072, head_dim=128),
            **_routed(160, 8, 1536, 3),
        },
    ),
    "glm-4.5-air": Preset(
        "zai-org/GLM-4.5-Air",
        {
            **_dense("glm4_moe", 46, 4096, (96, 8), 10_944, 151_552, 131_072, head_dim=128),
            **_routed(128, 8, 1408, 1),
        },
    ),
    "glm-4.7-flash": Preset(
        "zai-org/GLM-4.7-Flash",
        {
            **_dense("glm4_moe_lite", 47, 2048, (20, 20), 10_240, 154_880, 202_752),
            **_latent(768, 192, 256),
            **_routed(64, 4, 1536, 1),
        },
    ),
    "glm-5": Preset(
        "zai-org/GLM-5",
        {
            **_dense("glm_moe_dsa", 78, 6144, (64, 64), 12_288, 154_880, 202_752),
            **_latent(2048, 192, 256),
            **_routed(256, 8, 2048, 3),
            **_indexer(32),
        },
    ),
    "minimax-m2": Preset(
        "MiniMaxAI/MiniMax-M2",
        _dense(
            "minimax_m2",
            62,
            3072,
            (48, 8),
            1536,
            200_064,
            196_608,
            head_dim=128,
            num_local_experts=256,
            num_experts_per_tok=8,
            **FP8,
        ),
    ),
    "command-r": Preset("CohereLabs/c4ai-command-r-08-2024", _cohere("cohere", 40, 8192, (64, 8), 24_576)),
    "command-r-plus": Preset("CohereLabs/c4ai-command-r-plus-08-2024", _cohere("cohere", 64, 12_288, (96, 8), 33_792)),
    "command-r7b": Preset(
        "CohereLabs/c4ai-command-r7b-12-2024",
        _cohere("cohere2", 32, 4096, (32, 8), 14_336, context=132_096, **_COHERE_WINDOW),
    ),
    "command-a": Preset(
        "CohereLabs/c4ai-command-a-03-2025", _cohere("cohere2", 64, 12_288, (96, 8), 36_864, **_COHERE_WINDOW)
    ),
    "exaone-4.0-32b": Preset(
        "LGAI-EXAONE/EXAONE-4.0-32B",
        _dense(
            "exaone4", 64, 5120, (40, 8), 27_392, 102_400, 131_072, sliding_window=4096, sliding_window_pattern="LLLG"
        ),
    ),
    "nemotron-nano-9b-v2": Preset(
        "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
        _nemotron(NEMOTRON_NANO_9B_V2, 4480, (40, 8), 15_680, mamba_num_heads=128, mamba_head_dim=80),
    ),
    "nemotron-3-nano-30b": Preset(
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        {
            **_nemotron(NEMOTRON_3_NANO, 2688, (32, 2), 1856, mamba_num_heads=64, mamba_head_dim=64, context=262_144),
            **_routed(128, 6, 1856, 0),
            "moe_shared_expert_intermediate_size": 3712,
        },
    ),
    "jamba-1.5-mini": Preset(
        "ai21labs/AI21-Jamba-1.5-Mini",
        {
            **_dense("jamba", 32, 4096, (32, 8), 14_336, 65_536, 262_144),
            **{"num_experts": 16, "num_experts_per_tok": 2, "expert_layer_period": 2, "expert_layer_offset": 1},
            **{
                "attn_layer_period": 8,
                "attn_layer_offset": 4,
                "mamba_d_state": 16,
                "mamba_d_conv": 4,
                "mamba_expand": 2,
            },
        },
    ),
    "opt-13b": Preset(
        "facebook/opt-13b",
        {
            **{"model_type": "opt", "torch_dtype": "float16", "num_hidden_layers": 40, "hidden_size": 5120},
            **{"num_attention_heads": 40, "ffn_dim": 20_480, "vocab_size": 50_272, "max_position_embeddings": 2048},
            "tie_word_embeddings": True,
        },
    ),
}


NAMES_SHOWN = 8  # in a complaint
VARIANTS = ("-instruct", "-it", "-chat", "-base", "-hf")  # endings of tuned siblings, which share their base's shape


def preset(name: str) -> Model:
    """Return a published model by its short name or by its repository's name, in any case.

    A tuned sibling of a known model is sized as that one, with a note.

    Raises:
        ConfigError: there is none; the message lists those that resemble it.
    """
    wanted = name.lower()
    for key, one in PRESETS.items():
        if wanted in _names(key, one):
            return model_of(one.config, key)
    for key, one in PRESETS.items():
        if _stem(wanted) in map(_stem, _names(key, one)):
            model = model_of(one.config, key)
            return replace(model, notes=(*model.notes, f"{name} is taken to have the shape of {one.source}"))
    alike = [
        key for key in PRESETS if any(part in key for part in wanted.replace("/", "-").split("-") if len(part) > 2)
    ]
    some = ", ".join((alike or list(PRESETS))[:NAMES_SHOWN])
    raise ConfigError(f"no preset is named {shown(name)}; known are {some}, ... (kvroute size --list)")


def _names(key: str, one: Preset) -> tuple[str, str, str]:
    source = one.source.lower()
    return key, source, source.rpartition("/")[2]


def _stem(name: str) -> str:
    return next((name.removesuffix(ending) for ending in VARIANTS if name.endswith(ending)), name)
