"""Reading published configurations: every spelling in use, and one clear line for every fault."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import kv_bytes_per_token, kv_bytes_per_token_unbounded, state_bytes
from kvroute.sizing.layers import Attention, Latent, State
from kvroute.sizing.model import CONFIG_BYTES_LIMIT, model_from_json, model_of
from kvroute.sizing.presets import PRESETS

BASE = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 8,
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 4096,
    "vocab_size": 32_000,
}
MAMBA2 = {"mamba_n_heads": 32, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}


def windows(**fields):
    """Read the window of each layer of a small model with these fields."""
    return [cache.window for cache in model_of({**BASE, **fields}).caches]


def kinds(**fields):
    """Read what each layer of a small model keeps: A(ttention), S(tate) or nothing."""
    return "".join(
        "".join("S" if isinstance(cache, State) else "A" for cache in layer) or "-"
        for layer in model_of({**BASE, **fields}).layers
    )


def test_head_count_defaults():
    """Without num_key_value_heads every query head has its own, without head_dim it is hidden size over heads."""
    model = model_of({key: value for key, value in BASE.items() if key != "num_key_value_heads"})
    assert model.caches[0] == Attention(16, 64, 64)


@pytest.mark.parametrize(
    "fields",
    [
        {"n_layer": 8, "n_head": 16, "n_embd": 1024},
        {"num_layers": 8, "num_attention_heads": 16, "hidden_size": 1024},
        {"n_layers": 8, "n_heads": 16, "d_model": 1024},
    ],
)
def test_older_spellings(fields):
    """GPT-2, ChatGLM and MPT name the same facts differently."""
    assert model_of(fields).layers == ((Attention(16, 64, 64),),) * 8


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query_attention": True, "multi_query_group_num": 2}, 2),
        ({"num_kv_heads": 4, "new_decoder_architecture": True, "multi_query": True}, 4),
        ({"n_head_kv": 8}, 8),
        ({"attn_config": {"kv_n_heads": 2}}, 2),
    ],
)
def test_other_ways_to_say_kv_heads(fields, heads):
    """Multi-query flags and family-specific names give the same count."""
    plain = {key: value for key, value in BASE.items() if key != "num_key_value_heads"}
    assert model_of({**plain, **fields}).caches[0] == Attention(heads, 64, 64)


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


def test_nemotron_pattern():
    """M is Mamba, * attention, - and E keep nothing; n_groups and the 32-bit recurrence count."""
    fields = {"mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    model = model_of({**BASE, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME-M", **fields})
    assert [len(layer) for layer in model.layers] == [1, 0, 1, 1, 1, 0, 0, 1]
    conv, state = (32 * 64 + 2 * 8 * 128) * 3 * 2, 32 * 64 * 128 * 4
    assert state_bytes(model) == 4 * (conv + state)
    assert kv_bytes_per_token(model) == 4 * 2 * 64 * 2


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


def test_windows_with_heads_of_their_own():
    """MiMo's window layers have other head counts and value sizes than its full ones."""
    pattern = {"hybrid_layer_pattern": [0, 1] * 4, "sliding_window": 128, "head_dim": 192, "v_head_dim": 128}
    model = model_of({**BASE, **pattern, "swa_num_key_value_heads": 8, "swa_head_dim": 96, "swa_v_head_dim": 96})
    assert model.caches[:2] == [Attention(4, 192, 128), Attention(8, 96, 96, 128)]


def test_multimodal_configurations():
    """The language model is found inside, and what is not counted is said."""
    model = model_of({"model_type": "gemma3", "text_config": BASE, "vision_config": {"hidden_size": 1}})
    assert model.layers == model_of(BASE).layers
    assert any("language model" in note for note in model.notes)
    deep = {"model_type": "qwen2_5_omni", "thinker_config": {"text_config": BASE}}
    assert model_of(deep).layers == model_of(BASE).layers


def test_what_a_family_leaves_out_is_noted():
    """Gemma 3 4B's published file has no head counts: those of its configuration class are used and named."""
    text = {"model_type": "gemma3_text", "hidden_size": 2560, "num_hidden_layers": 34, "sliding_window": 1024}
    model = model_of({"model_type": "gemma3", "text_config": text, "vision_config": {}})
    assert kv_bytes_per_token_unbounded(model) == 34 * 2 * 4 * 256 * 2
    assert sum("assumed" in note for note in model.notes) >= 3


def test_sparse_attention_keeps_an_index_too():
    """DeepSeek V3.2 keeps 132 bytes a token and layer for its indexer beside the latent vector."""
    model = model_of({**PRESETS["deepseek-v3.2"].config})
    assert kv_bytes_per_token(model) == 61 * (576 * 2 + 132)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers is missing"),
        ({"num_attention_heads": None}, "num_attention_heads is missing"),
        ({"num_attention_heads": 0}, "num_attention_heads must be from 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be from 1"),
        ({"num_key_value_heads": 32}, "more than the 16 query heads"),
        ({"num_hidden_layers": -3}, "num_hidden_layers must be from 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers must be from 1 to 2,048"),
        ({"num_hidden_layers": "8"}, "num_hidden_layers must be a whole number, not '8'"),
        ({"num_hidden_layers": 8.5}, "num_hidden_layers must be a whole number"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be a whole number"),
        ({"hidden_size": 1000}, "1000 is not a multiple of num_attention_heads 16"),
        ({"head_dim": 0}, "head_dim must be from 1"),
        ({"head_dim": 10**50}, "head_dim must be from 1"),
        ({"layer_types": ["full_attention"] * 3}, "layer_types has 3 entries for 8 layers"),
        ({"layer_types": ["quantum"] * 8}, "layer_types has the type 'quantum'; known are"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing"),
        ({"layer_types": ["mamba"] * 8}, "the recurrent layers' state is not described"),
        ({"hybrid_override_pattern": "M?"}, "hybrid_override_pattern has the letter"),
        ({"hybrid_override_pattern": "----"}, "no layer keeps a cache"),
        ({"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        ({"text_config": 3}, "text_config must be an object"),
        ({"torch_dtype": "int3"}, "torch_dtype is 'int3'; known are"),
        ({"num_kv_shared_layers": 8}, "num_kv_shared_layers must be under"),
        ({"use_sliding_window": "yes", "sliding_window": 5}, "use_sliding_window must be true or false"),
        ({"block_configs": [{}] * 8}, "block_configs must hold an object with `attention`"),
    ],
)
def test_a_fault_is_one_line_that_names_the_field(change, names):
    """Missing, absurd and contradictory fields are refused by name."""
    with pytest.raises(ConfigError, match=names.replace("?", r"\?")) as caught:
        model_of({**BASE, **change})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"hello", b"[1, 2]", b"\xff\xfe\x00", b"3", b'{"a": ', b"null", b"[" * 100_000])
def test_what_is_no_configuration(data):
    """Text, arrays, cut and binary files are refused in one line."""
    with pytest.raises(ConfigError) as caught:
        model_from_json(data, "config.json")
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


def test_a_huge_file_is_refused_unread():
    """A file past the limit is refused by its size."""
    with pytest.raises(ConfigError, match="too many for a config"):
        model_from_json(b" " * (CONFIG_BYTES_LIMIT + 1), "config.json")


FIELDS = sorted(
    {field for one in PRESETS.values() for field in one.config} | {"text_config", "block_configs", "use_cla"}
)
JUNK = [
    *(None, True, False, 0, 1, 3, -1, 64, 10**9, 10**30, 10**5000, 0.5, 1e308, "", "auto", "relu", "é" * 99, [], {}),
    *([None], [0, 1] * 40, ["mamba"] * 99, ["full_attention"] * 99, [{}], [[]], {"text_config": {}}, {"attention": 3}),
    *({"group_0": {"weights": {"num_bits": 4, "group_size": 128}}}, {"quant_method": "awq", "bits": 4}, {"bits": []}),
]


def read(config):
    """Read a configuration: the model, or the complaint."""
    try:
        return model_of(config), ""
    except ConfigError as error:
        return None, str(error)


@given(st.sampled_from(sorted(PRESETS)), st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(JUNK), max_size=4))
def test_any_change_of_a_configuration_gives_a_model_or_one_line(name, change):
    """Whatever values fields take, the answer is a model with a cache or one clear line."""
    model, complaint = read({**PRESETS[name].config, **change})
    assert "\n" not in complaint
    assert len(complaint) < 1_000
    assert model is None or kv_bytes_per_token_unbounded(model) + state_bytes(model) > 0


@given(st.binary(max_size=200))
def test_any_bytes_give_a_model_or_one_line(data):
    """Random bytes are refused in one line."""
    with pytest.raises(ConfigError):
        model_from_json(data, "config.json")
