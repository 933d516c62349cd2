"""Reading published configurations: every spelling in use, and one clear line for every fault."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import kv_bytes_per_token, kv_bytes_per_token_unbounded, state_bytes
from kvroute.sizing.layers import Attention
from kvroute.sizing.model import CONFIG_BYTES_LIMIT, model_from_json, model_of
from kvroute.sizing.presets import PRESETS
from tests.sizing.shapes import BASE


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


def test_unknown_designs_give_a_partial_answer():
    """What can be counted is; what cannot is named with the fields that were sought or not understood."""
    recurrent = model_of({**BASE, "model_type": "novel", "layer_types": ["linear_attention", "full_attention"] * 4})
    assert kv_bytes_per_token(recurrent) == 4 * 2 * 4 * 64 * 2
    assert any("state is not counted" in note and "mamba_num_heads" in note for note in recurrent.notes)
    compressed = model_of({**BASE, "model_type": "novel", "compress_ratios": [4] * 8})
    assert any("compress_ratios" in note for note in compressed.notes)


def test_sparse_attention_keeps_an_index_too():
    """DeepSeek V3.2 keeps 132 bytes a token and layer for its indexer beside the latent vector."""
    model = model_of({**PRESETS["deepseek-v3.2"].config})
    assert kv_bytes_per_token(model) == 61 * (576 * 2 + 132)


def test_a_layer_of_an_unknown_type_is_counted_as_full_attention():
    """The rest of the model is sized all the same, and the note says which field was not understood."""
    model = model_of({**BASE, "layer_types": ["quantum", "full_attention"] * 4})
    assert model.layers == model_of(BASE).layers
    assert [note for note in model.notes if "layer_types has the type 'quantum', which is not known" in note]


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
        ({"layer_types": [3] * 8}, "layer_types has 3, where the name of a layer's type was expected"),
        ({"layer_types": ["sliding_attention"] * 8}, "sliding_window is missing"),
        ({"layer_types": ["mamba"] * 8}, "no layer keeps a cache that can be counted"),
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


@pytest.mark.parametrize(
    "declared",
    [
        {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}},
        {"quant_method": "modelopt", "quantization": {"kv_cache_quant_algo": "FP8"}},
        {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"},
    ],
)
def test_a_checkpoint_may_declare_an_8_bit_cache(declared):
    """Then that is what no choice of a dtype means, as engines take it; recurrent states and a chosen dtype stay."""
    model = model_of({**BASE, "quantization_config": declared})
    assert kv_bytes_per_token(model) * 2 == kv_bytes_per_token(model, 2) == kv_bytes_per_token(model_of(BASE))
    assert any("declares an 8-bit cache" in note for note in model.notes)


def test_a_cache_of_4_bits_is_said_not_to_be_counted():
    """What the checkpoint declares and sizing does not know is named."""
    declared = {"quant_method": "modelopt", "kv_cache_quant_algo": "NVFP4"}
    model = model_of({**BASE, "quantization_config": declared})
    assert any("kv_cache_quant_algo is 'NVFP4'" in note for note in model.notes)


@pytest.mark.parametrize("head", [b"", b"\xef\xbb\xbf"])
def test_json_as_python_writes_it(head):
    """Published hybrids hold Infinity, and some editors leave a byte-order mark: neither decides about the cache."""
    data = head + json.dumps({**BASE, "time_step_limit": [0.0, float("inf")]}).encode()
    assert model_from_json(data, "config.json").layers == model_of(BASE).layers
    with pytest.raises(ConfigError, match="num_hidden_layers must be a whole number, not nan"):
        model_from_json(json.dumps({**BASE, "num_hidden_layers": float("nan")}).encode(), "config.json")


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


@settings(deadline=None)
@given(st.sampled_from(sorted(PRESETS)), st.dictionaries(st.sampled_from(FIELDS), st.sampled_from(JUNK), max_size=4))
def test_any_change_of_a_configuration_gives_a_model_or_one_line(name, change):
    """Whatever values fields take, the answer is a model with a cache or one clear line."""
    model, complaint = read({**PRESETS[name].config, **change})
    assert "\n" not in complaint
    assert len(complaint) < 1_000
    assert model is None or kv_bytes_per_token_unbounded(model) + state_bytes(model) > 0


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_any_bytes_give_a_model_or_one_line(data):
    """Random bytes are refused in one line."""
    with pytest.raises(ConfigError):
        model_from_json(data, "config.json")
