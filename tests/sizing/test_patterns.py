"""Which layer does what, in every spelling in use."""

import pytest

from kvroute.sizing.layers import Latent
from kvroute.sizing.model import model_of
from kvroute.sizing.presets import PRESETS
from tests.sizing.shapes import BASE, MAMBA2, kinds, windows


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"layer_types": ["sliding_attention", "full_attention"] * 4, "sliding_window": 128}, [128, None] * 4),
        ({"sliding_window_pattern": 4, "sliding_window": 64}, [64, 64, 64, None] * 2),
        ({"_sliding_window_pattern": 2, "sliding_window": 64}, [64, None] * 4),
        ({"sliding_window_pattern": "LLLG", "sliding_window": 64}, [64, 64, 64, None] * 2),
        ({"interleaved_sliding_window": [None, 32, 32, 32]}, [None, 32, 32, 32] * 2),
        ({"interleaved_sliding_window": 32, "sliding_window_pattern": 2}, [32, None] * 4),
        ({"use_sliding_window": False, "sliding_window": 64}, [None] * 8),
        ({"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 6}, [None] * 6 + [64] * 2),
        ({"sliding_window": None}, [None] * 8),
        ({"sliding_window": 0}, [None] * 8),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 2}, [None] * 8),
        ({"model_type": "gemma2", "sliding_window": 64}, [64, None] * 4),
        ({"model_type": "gpt_oss", "sliding_window": 64}, [64, None] * 4),
        ({"model_type": "mistral", "sliding_window": 64}, [64] * 8),
        ({"hybrid_layer_pattern": [0, 1, 1, 1, 0, 1, 1, 1], "sliding_window_size": 64}, [None, 64, 64, 64] * 2),
    ],
)
def test_windows_in_every_spelling(fields, expected):
    """Which layers keep to a window follows from whichever field says so."""
    assert windows(**fields) == expected


def test_a_window_without_a_pattern_is_said():
    """A window that no field or family assigns to layers is counted as full attention, and noted."""
    model = model_of({**BASE, "model_type": "novel", "sliding_window": 64})
    assert {cache.window for cache in model.caches} == {None}
    assert any("no field says which layers" in note for note in model.notes)


def test_chunked_local_attention():
    """Llama 4 keeps one chunk in three of four layers."""
    model = model_of({**BASE, "model_type": "llama4_text", "attention_chunk_size": 512})
    assert [cache.chunk for cache in model.caches] == [512, 512, 512, None] * 2
    marked = model_of(
        {**BASE, "model_type": "llama4_text", "attention_chunk_size": 512, "no_rope_layers": [0, 1, 1, 1] * 2}
    )
    assert [cache.chunk for cache in marked.caches] == [None, 512, 512, 512] * 2


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"layer_types": ["mamba", "mamba", "mamba", "attention"] * 2, **MAMBA2}, "SSSASSSA"),
        ({"layers_block_type": ["mamba", "attention"] * 4, **MAMBA2}, "SA" * 4),
        ({"attn_layer_indices": [3], **MAMBA2}, "SSSASSSS"),
        ({"attn_layer_period": 4, "attn_layer_offset": 1, **MAMBA2}, "SASSSASS"),
        ({"layer_types": ["hybrid"] * 8, **MAMBA2}, "AS" * 8),
        ({"full_attn_idxs": [2, 5], "conv_L_cache": 3}, "SSASSASS"),
        ({"layer_types": ["conv", "full_attention"] * 4, "conv_L_cache": 3}, "SA" * 4),
    ],
)
def test_hybrids(fields, expected):
    """Recurrent layers keep a state and no tokens, in every way of saying which they are."""
    assert kinds(**fields) == expected


def test_kimi_linear_counts_layers_from_one():
    """full_attn_layers of linear_attn_config is one-based; those layers are latent."""
    linear = {"full_attn_layers": [4, 8], "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4}
    latent = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    model = model_of({**BASE, "model_type": "kimi_linear", "linear_attn_config": linear, **latent})
    assert [isinstance(layer[0], Latent) for layer in model.layers] == [False, False, False, True] * 2


def test_cross_layer_sharing():
    """Layers that read another layer's cache keep none."""
    assert kinds(num_kv_shared_layers=3) == "AAAAA---"
    assert kinds(use_cla=True, cla_share_factor=2) == "A-" * 4


def test_pruned_layers():
    """Pruned Nemotron models say for each layer whether it attends and with how many query heads a KV head."""
    block = [{"attention": {"n_heads_in_group": 8}}, {"attention": {"no_op": True}}] * 4
    model = model_of({**BASE, "block_configs": block})
    assert [layer[0].kv_heads if layer else 0 for layer in model.layers] == [2, 0] * 4


def test_a_word_a_layer_counts_the_layers():
    """Nemotron-H as transformers release 5 writes it has words and no number: the same model as by letters."""
    config = dict(PRESETS["nemotron-3-nano-30b"].config)
    by_letters = model_of(config)
    words = {"M": "linear_attention", "*": "full_attention", "E": "moe", "-": "mlp"}
    config["layers_block_type"] = [words[letter] for letter in config.pop("hybrid_override_pattern")]
    del config["num_hidden_layers"]
    assert model_of(config).layers == by_letters.layers
    assert model_of(config).weights == by_letters.weights
