"""The state that recurrent layers keep for a sequence, from the spellings of the published hybrid families.

The shapes are those that vLLM allocates (`mamba_utils.py`: MambaStateShapeCalculator): the convolution keeps its last
kernel - 1 inputs, the recurrence one matrix a head. Sizes in numbers here; bytes are the layer's business.
"""

from __future__ import annotations

from kvroute.errors import ConfigError
from kvroute.sizing.fields import Fields
from kvroute.sizing.layers import State

DTYPE_BYTES = {
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "half": 2,
    "float": 4,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3fn": 1,
}


def state_of(fields: Fields, element_bytes: int) -> State:
    """Return the state of one recurrent layer; `element_bytes` is the size of the model's own numbers.

    A recurrence of an unknown kind is an empty state, with a note that names the fields that were sought.

    Raises:
        ConfigError: a known recurrence lacks a field.
    """
    if fields.has("linear_num_value_heads"):
        return _gated_delta(fields, element_bytes)
    linear = fields.inner("linear_attn_config")
    if linear is not None:
        return _delta(
            linear.needed("num_heads"),
            linear.needed("head_dim"),
            linear.needed("short_conv_kernel_size"),
            element_bytes,
        )
    if fields.has("linear_num_heads"):
        kernel = fields.needed("linear_conv_kernel_dim")
        return _delta(fields.needed("linear_num_heads"), fields.needed("linear_head_dim"), kernel, element_bytes)
    if fields.has("mamba_num_heads") or fields.has("mamba_n_heads"):
        return _mamba2(fields, element_bytes)
    if fields.has("mamba_d_state"):
        return _mamba1(fields, element_bytes)
    if fields.has("conv_L_cache"):
        channels = fields.whole("conv_dim") or fields.needed("hidden_size")
        return State(
            conv_channels=channels, conv_steps=fields.needed("conv_L_cache") - 1, conv_element_bytes=element_bytes
        )
    if (fields.word("model_type") or "").startswith("minimax"):
        heads = fields.needed("num_attention_heads")
        head = fields.whole("head_dim") or fields.needed("hidden_size") // heads
        return State(heads=heads, head_numbers=head * head, state_element_bytes=element_bytes)
    fields.notes.append(
        f"{fields.path}the recurrent layers' state is not counted: no known set of fields describes it (sought: "
        "linear_num_value_heads, linear_attn_config, mamba_num_heads, mamba_n_heads, mamba_d_state, conv_L_cache)"
    )
    return State()


def _gated_delta(fields: Fields, element_bytes: int) -> State:
    """Gated DeltaNet (Qwen3-Next, Qwen3.5)."""
    key_heads, key_dim = fields.needed("linear_num_key_heads"), fields.needed("linear_key_head_dim")
    heads, value_dim = fields.needed("linear_num_value_heads"), fields.needed("linear_value_head_dim")
    return State(
        conv_channels=2 * key_heads * key_dim + heads * value_dim,
        conv_steps=fields.needed("linear_conv_kernel_dim") - 1,
        heads=heads,
        head_numbers=key_dim * value_dim,
        out_channels=heads * value_dim,
        conv_element_bytes=element_bytes,
        state_element_bytes=_stated_bytes(fields, "mamba_ssm_dtype") or element_bytes,
    )


def _delta(heads: int, head_dim: int, kernel: int, element_bytes: int) -> State:
    """Kimi Delta Attention. Its recurrence is kept in 32 bits."""
    return State(
        conv_channels=3 * heads * head_dim,
        conv_steps=kernel - 1,
        heads=heads,
        head_numbers=head_dim * head_dim,
        out_channels=heads * head_dim,
        conv_element_bytes=element_bytes,
        state_element_bytes=4,
    )


def _mamba2(fields: Fields, element_bytes: int) -> State:
    heads = fields.needed("mamba_num_heads", "mamba_n_heads")
    hidden = fields.needed("hidden_size")
    inner = fields.whole("mamba_d_ssm") or (fields.whole("mamba_expand") or 0) * hidden
    stated = fields.data.get("mamba_d_head")
    dim = fields.whole("mamba_head_dim") if stated in (None, "auto") else fields.whole("mamba_d_head")
    dim = dim or inner // heads
    if not dim:
        raise ConfigError(f"{fields.path}mamba_head_dim is missing (or mamba_d_head, or mamba_expand)")
    state = fields.needed("ssm_state_size", "mamba_d_state")
    # Nemotron-H keeps the recurrence in 32 bits unless its configuration says otherwise; the others as the model.
    default = 4 if (fields.word("model_type") or "").startswith("nemotron_h") else element_bytes
    return State(
        conv_channels=heads * dim,
        conv_group_channels=2 * state,
        conv_groups=fields.needed("n_groups", "mamba_n_groups", "mamba_ngroups"),
        conv_steps=fields.needed("conv_kernel", "mamba_d_conv") - 1,
        heads=heads,
        head_numbers=dim * state,
        out_channels=heads * dim,
        conv_element_bytes=element_bytes,
        state_element_bytes=_stated_bytes(fields, "mamba_ssm_cache_dtype") or default,
    )


def _mamba1(fields: Fields, element_bytes: int) -> State:
    inner = fields.needed("mamba_expand") * fields.needed("hidden_size")
    return State(
        conv_channels=inner,
        conv_steps=fields.needed("mamba_d_conv") - 1,
        heads=inner,
        out_channels=inner,
        head_numbers=fields.needed("mamba_d_state"),
        conv_element_bytes=element_bytes,
        state_element_bytes=element_bytes,
    )


def _stated_bytes(fields: Fields, name: str) -> int | None:
    word = fields.word(name)
    if word is None:
        return None
    if word not in DTYPE_BYTES:
        raise fields.wrong(name, f"is {word!r}; known are {', '.join(DTYPE_BYTES)}")
    return DTYPE_BYTES[word]
