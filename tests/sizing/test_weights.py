"""Parameters and bytes of weights. Totals against published models are in test_presets."""

import pytest

from kvroute.sizing.model import model_of
from kvroute.sizing.presets import PRESETS
from tests.sizing.shapes import BASE

DENSE = 8 * (1024 * (2 * 1024 + 2 * 256) + 3 * 1024 * 4096)
EMBEDDINGS = 2 * 1024 * 32_000


def weights(**fields):
    """Count the weights of the small model with these fields."""
    return model_of({**BASE, **fields}).weights


def test_a_dense_model():
    """Embeddings twice, attention, and a gated feed-forward in every layer."""
    assert weights().parameters == EMBEDDINGS + DENSE
    assert weights().total_bytes == 2 * (EMBEDDINGS + DENSE)
    assert weights(tie_word_embeddings=True).parameters == EMBEDDINGS // 2 + DENSE


@pytest.mark.parametrize(
    ("quantisation", "bits"),
    [
        ({"quant_method": "fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "modelopt_fp4"}, 4.5),
        ({"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": 8}}}}, 8),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128}}},
            },
            4.125,
        ),
    ],
)
def test_quantised_checkpoints(quantisation, bits):
    """Matrices take their bits and scales; embeddings stay in 16 bits; the cache's size does not change."""
    model = model_of({**BASE, "quantization_config": quantisation})
    assert model.weights.total_bytes == 2 * EMBEDDINGS + round(DENSE * bits / 8)
    assert model.element_bytes == 2


def test_an_unknown_quantisation_is_said():
    """It is counted unquantised, and noted."""
    model = model_of({**BASE, "quantization_config": {"quant_method": "magic"}})
    assert model.weights.total_bytes == 2 * (EMBEDDINGS + DENSE)
    assert any("magic" in note for note in model.notes)


@pytest.mark.parametrize(
    ("fields", "sparse"),
    [
        ({}, 8),
        ({"first_k_dense_replace": 3}, 5),
        ({"mlp_only_layers": [0, 1]}, 6),
        ({"decoder_sparse_step": 2}, 4),
        ({"expert_layer_period": 4, "expert_layer_offset": 1}, 2),
        ({"moe_layer_freq": [0, 1, 1, 1, 1, 1, 1, 1]}, 7),
    ],
)
def test_which_layers_have_experts(fields, sparse):
    """Every way of saying it decides which feed-forwards are replaced by experts."""
    mixed = weights(num_experts=16, num_experts_per_tok=2, moe_intermediate_size=512, **fields)
    experts = sparse * 16 * 3 * 1024 * 512
    assert mixed.expert_bytes == 2 * experts
    router = sparse * 1024 * 16
    dense = EMBEDDINGS + DENSE - sparse * 3 * 1024 * 4096
    assert mixed.parameters == dense + router + experts
    assert mixed.active_parameters == mixed.parameters - experts + experts // 8


def test_a_stated_size_replaces_the_count():
    """Files know best; the experts' share stays."""
    counted = model_of(PRESETS["gpt-oss-20b"].config).weights
    stated = counted.resized(2 * counted.total_bytes)
    assert stated.total_bytes == 2 * counted.total_bytes
    assert stated.expert_bytes == pytest.approx(2 * counted.expert_bytes)


def test_what_cannot_be_counted_is_none():
    """Without a vocabulary or a feed-forward there is no count, and a note says so."""
    for name in ("vocab_size", "intermediate_size"):
        model = model_of({key: value for key, value in BASE.items() if key != name})
        assert model.weights is None
        assert any("cannot be counted" in note for note in model.notes)


def test_dense_layers_by_word():
    """`mlp_layer_types` says a word a layer, as the transformers library writes instead of first_k_dense_replace."""
    config = dict(PRESETS["glm-5"].config)
    by_number = model_of(config).weights
    del config["first_k_dense_replace"]
    config["mlp_layer_types"] = ["dense"] * 3 + ["sparse"] * 75
    assert model_of(config).weights == by_number


def test_a_width_a_layer():
    """Gemma 3n lists the feed-forward's width for every layer; the sum is counted."""
    plain = model_of({**BASE, "intermediate_size": 4096}).weights.parameters
    listed = model_of({**BASE, "intermediate_size": [2048, 6144] * 4}).weights.parameters
    assert listed == plain
