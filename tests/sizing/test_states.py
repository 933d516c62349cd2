"""States of recurrent layers, against the shapes that vLLM allocates."""

import pytest

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import kv_bytes_per_token, state_bytes
from kvroute.sizing.model import model_of
from kvroute.sizing.presets import preset
from tests.sizing.shapes import BASE, kinds


def test_nemotron_pattern():
    """M is Mamba, * attention, - and E keep nothing; n_groups and the 32-bit recurrence count."""
    fields = {"mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128, "conv_kernel": 4}
    model = model_of({**BASE, "model_type": "nemotron_h", "hybrid_override_pattern": "M-M*ME-M", **fields})
    assert [len(layer) for layer in model.layers] == [1, 0, 1, 1, 1, 0, 0, 1]
    conv, state = (32 * 64 + 2 * 8 * 128) * 3 * 2, 32 * 64 * 128 * 4
    assert state_bytes(model) == 4 * (conv + state)
    assert kv_bytes_per_token(model) == 4 * 2 * 64 * 2


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2}, 2048 * 3 + 2048 * 16),
        ({"conv_L_cache": 3}, 1024 * 2),
        ({"conv_L_cache": 3, "conv_dim": 512}, 512 * 2),
        ({"mamba_n_heads": 32, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_n_groups": 1, "mamba_d_state": 128,
          "mamba_d_conv": 4}, (2048 + 256) * 3 + 2048 * 128),
        ({"model_type": "minimax", "head_dim": 64}, 16 * 64 * 64),
    ],
)  # fmt: skip
def test_states_of_other_families(fields, numbers):
    """Mamba, short convolutions, Mamba 2 with a derived head and lightning attention, in 16 bits."""
    model = model_of({**BASE, "layer_types": ["linear_attention"] * 8, **fields})
    assert state_bytes(model) == 8 * 2 * numbers


def test_gated_delta_net():
    """Qwen3-Next keeps 3 inputs of 8,192 channels and 32 matrices of 128 by 128 in each of 36 layers."""
    assert state_bytes(preset("qwen3-next-80b")) == 36 * 2 * (8_192 * 3 + 32 * 128 * 128)


def test_delta_attention_recurs_in_32_bits():
    """Kimi Delta Attention keeps its matrices in 32 bits and its convolution in the model's."""
    linear = {"full_attn_layers": [8], "num_heads": 4, "head_dim": 64, "short_conv_kernel_size": 4}
    model = model_of({**BASE, "linear_attn_config": linear})
    assert state_bytes(model) == 7 * (3 * 4 * 64 * 3 * 2 + 4 * 64 * 64 * 4)


def test_groups_are_filled_up_for_tensor_parallelism():
    """One group of B and C becomes one on each GPU; heads are split."""
    state = model_of({**BASE, "layer_types": ["mamba"] * 8, "mamba_n_heads": 32, "mamba_d_head": 64,
                      "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}).caches[0]  # fmt: skip
    assert state.fixed_bytes(4) == (32 * 64 + 4 * 256) // 4 * 3 * 2 + 8 * 64 * 128 * 2


def test_a_state_without_its_size_is_refused():
    """A Mamba 2 layer without a head size names the field."""
    with pytest.raises(ConfigError, match="mamba_head_dim is missing"):
        kinds(layer_types=["mamba"] * 8, mamba_n_heads=32, mamba_d_state=1, mamba_n_groups=1, mamba_d_conv=4)


def test_minimax_without_a_head_dim():
    """A head's size follows from the hidden size where it is not stated."""
    fields = {**BASE, "model_type": "minimax", "attn_type_list": [0, 1] * 4}
    assert state_bytes(model_of(fields)) == state_bytes(model_of({**fields, "head_dim": 64})) == 4 * 16 * 64 * 64 * 2
