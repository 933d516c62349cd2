"""A model's shape, read from the `config.json` that is published with it.

`model_of` takes the parsed object, `model_from_json` the bytes; neither opens files. What a configuration leaves to its
family's code is taken from the transformers library's configuration classes and noted; what cannot be known is an
error that names the field. Only the language model is described: encoders of images and sound keep no cache.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sizing.compressed import compressed_layer, index_bytes
from kvroute.sizing.fields import Fields, shown
from kvroute.sizing.layers import Attention, Cache, Latent, Layer
from kvroute.sizing.patterns import Kind, kinds_of
from kvroute.sizing.states import DTYPE_BYTES, state_of
from kvroute.sizing.weights import Weights, weights_of

CONFIG_BYTES_LIMIT = 4 << 20  # the largest published config.json are under 1 MiB
NESTED = ("text_config", "language_config", "llm_config", "thinker_config", "language_model")
PLAIN_HEADS_FAMILIES = frozenset({"minicpm3"})  # have kv_lora_rank, but engines keep plain heads
FAMILY_HEADS = {"gemma3_text": (8, 4, 256), "gemma3": (8, 4, 256)}  # query heads, KV heads, head dim where not stated
NOT_MODELLED = {  # fields that change the cache in a way that is not computed here
    "compress_ratios": "compressed attention keeps less than is counted here",
    "attention_window_size": "a local attention window is counted as full attention",
    "kv_compression_ratio": "compressed attention keeps less than is counted here",
}


class Model(Struct, frozen=True, kw_only=True):
    """What sizing needs to know of a model."""

    name: str
    family: str  # model_type, or the architecture's class name
    layers: tuple[Layer, ...]
    element_bytes: int = 2  # of a number in the cache where no cache dtype is chosen
    query_heads: int = 0
    hidden_size: int = 0
    context_tokens: int | None = None  # longest context that the model was made for
    weights: Weights | None = None
    notes: tuple[str, ...] = ()  # what was assumed, and what is not counted

    @property
    def caches(self) -> list[Cache]:
        """Every cache of every layer."""
        return [cache for layer in self.layers for cache in layer]


def model_from_json(data: bytes, name: str) -> Model:
    """Read the bytes of a `config.json`.

    Raises:
        ConfigError: too large, no JSON object, or a field that is missing or wrong.
    """
    if len(data) > CONFIG_BYTES_LIMIT:
        raise ConfigError(
            f"{name}: {len(data):,} bytes are too many for a config.json (at most {CONFIG_BYTES_LIMIT:,})"
        )
    parsed = _parsed(data, name)
    if not isinstance(parsed, dict):
        raise ConfigError(f"{name}: a config.json holds an object, this holds {shown(parsed)}")
    try:
        return model_of(parsed, name)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error.message}") from None


def _parsed(data: bytes, name: str) -> Any:
    """Parse JSON; then once more as Python reads it, for files with NaN, Infinity or a byte-order mark."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as strict:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ConfigError(f"{name}: not JSON: {strict}") from None


def model_of(config: Mapping[str, Any], name: str = "model") -> Model:
    """Describe a model from its configuration.

    Raises:
        ConfigError: a field is missing or wrong; the message names it.
    """
    root = Fields(config)
    fields = _language(root)
    kinds = kinds_of(fields)
    element_bytes = _element_bytes(fields, root)
    layers = _layers(fields, kinds, element_bytes)
    if not any(cache.bytes_per_token(1) or cache.fixed_bytes() for layer in layers for cache in layer):
        raise ConfigError("no layer keeps a cache that can be counted: is this a decoder's configuration?")
    for field, meaning in NOT_MODELLED.items():
        if fields.has(field) and not any(kind.compressed is not None for kind in kinds):
            fields.notes.append(f"{fields.path}{field}: {meaning}")
    return Model(
        name=name,
        family=fields.word("model_type") or _architecture(root) or "unknown",
        layers=layers,
        element_bytes=_cache_bytes(fields, root, kinds) or element_bytes,
        query_heads=_heads(fields) or 0,
        hidden_size=fields.whole("hidden_size", "n_embd", "d_model") or 0,
        context_tokens=fields.whole("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"),
        weights=weights_of(fields, root, kinds, layers, element_bytes),
        notes=tuple(dict.fromkeys(fields.notes)),
    )


def _language(root: Fields) -> Fields:
    """Find the language model inside a multimodal configuration."""
    fields = root
    for _ in range(3):  # thinker_config.text_config is the deepest in use
        inner = next((found for name in NESTED if (found := fields.inner(name)) is not None), None)
        if inner is None:
            break
        fields = inner
    if fields is not root and any(root.has(name) for name in ("vision_config", "audio_config", "thinker_config")):
        root.notes.append("only the language model is counted; encoders of images or sound take memory beside it")
    return fields


def _architecture(root: Fields) -> str | None:
    names = root.items("architectures") or [None]
    return names[0] if isinstance(names[0], str) else None


def _element_bytes(fields: Fields, root: Fields) -> int:
    word = fields.word("torch_dtype", "dtype") or root.word("torch_dtype", "dtype")
    if word is None:
        fields.notes.append("torch_dtype is not stated: 16-bit numbers assumed")
        return 2
    size = DTYPE_BYTES.get(word.removeprefix("torch."))
    if size is None:
        raise root.wrong("torch_dtype", f"is {shown(word)}; known are {', '.join(DTYPE_BYTES)}")
    # Engines run 32-bit checkpoints in 16 bits unless told otherwise; an 8-bit checkpoint still computes in 16.
    if size != 2:
        fields.notes.append(f"the checkpoint says {word}: cache and weights counted in 16 bits, as engines run it")
    return 2


def _cache_bytes(fields: Fields, root: Fields, kinds: list[Kind]) -> int | None:
    """Bytes of a number in the cache where the checkpoint or its family chooses other ones than the model's own.

    As vLLM resolves --kv-cache-dtype auto: `kv_cache_scheme` of compressed-tensors, `kv_cache_quant_algo` of modelopt.
    """
    if any(kind.compressed is not None for kind in kinds):
        fields.notes.append("the cache is counted in 8 bits, as engines keep it for this family")
        return 1
    quantised = root.inner("quantization_config") or root.inner("compression_config")
    inner = quantised and quantised.inner("quantization")
    for place in (inner, quantised):
        for name in ("kv_cache_scheme", "kv_cache_quant_algo") if place else ():
            chosen = place.data.get(name) if place else None
            bits = chosen.get("num_bits") if isinstance(chosen, dict) else None
            if bits == 8 or (isinstance(chosen, str) and chosen.lower() == "fp8"):
                fields.notes.append(
                    f"the checkpoint declares an 8-bit cache ({name}): counted so unless a dtype is chosen"
                )
                return 1
            if chosen is not None:
                fields.notes.append(f"{name} is {shown(chosen)}, which is not counted: choose a --kv-cache-dtype")
    return None


def _heads(fields: Fields) -> int | None:
    return fields.whole("num_attention_heads", "n_head", "n_heads")


def _layers(fields: Fields, kinds: list[Kind], element_bytes: int) -> tuple[Layer, ...]:
    """Build each layer's caches. Layers of one kind share the same value."""
    made = {kind: _layer(fields, kind, element_bytes) for kind in dict.fromkeys(kinds)}
    return tuple(made[kind] for kind in kinds)


def _layer(fields: Fields, kind: Kind, element_bytes: int) -> Layer:
    if kind.form == "nothing":
        return ()
    if kind.form == "state":
        return (state_of(fields, element_bytes),)
    if kind.compressed is not None:
        return compressed_layer(fields, kind)
    attention: Cache = _latent(fields) if _is_latent(fields) else _attention(fields, kind)
    return (attention, state_of(fields, element_bytes)) if kind.form == "both" else (attention,)


def _is_latent(fields: Fields) -> bool:
    return fields.has("kv_lora_rank") and (fields.word("model_type") or "") not in PLAIN_HEADS_FAMILIES


def _latent(fields: Fields) -> Latent:
    rope = fields.needed("qk_rope_head_dim", least=0)
    index = fields.whole("index_head_dim")
    heads, nope, value = _heads(fields), fields.whole("qk_nope_head_dim", least=0), fields.whole("v_head_dim")
    plain = None if heads is None or nope is None or value is None else Attention(heads, nope + rope, value)
    rank = fields.needed("kv_lora_rank")
    if not index:
        return Latent(rank, rope, plain=plain)
    # In an 8-bit cache a vector has a 4-byte scale for 128 numbers, and its rotary part stays in 16 bits (fp8_ds_mla).
    return Latent(
        rank,
        rope,
        index_bytes(index),
        plain,
        eight_bit_bytes=rank + -(-rank // 128) * 4 + 2 * rope,
        chosen=fields.whole("index_topk"),
        index_numbers=index * (fields.whole("index_n_heads") or 0),
    )


def _attention(fields: Fields, kind: Kind) -> Attention:
    family = fields.word("model_type") or ""
    query, heads, dim = _usual_heads(fields, family)
    value: int | None = None
    if family in PLAIN_HEADS_FAMILIES:
        dim = fields.needed("qk_nope_head_dim") + fields.needed("qk_rope_head_dim")
    elif fields.has("v_head_dim"):
        value = fields.needed("v_head_dim")
    if kind.window is not None:
        heads = fields.whole("swa_num_key_value_heads") or heads
        dim = fields.whole("swa_head_dim") or dim
        value = fields.whole("swa_v_head_dim") or value
    elif family.startswith("gemma4"):
        dim = fields.assumed(512, "global_head_dim", why="as the gemma4 family does")
        heads = (fields.whole("num_global_key_value_heads") if fields.flag("attention_k_eq_v") else None) or heads
    if kind.heads_in_group is not None:
        heads = max(1, query // kind.heads_in_group)
    return Attention(heads, dim, value or dim, kind.window, kind.chunk)


def _usual_heads(fields: Fields, family: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head dim, as most layers have them."""
    if family in FAMILY_HEADS and not fields.has("num_attention_heads"):
        default_query, default_kv, default_dim = FAMILY_HEADS[family]
        why = f"as the {family} family does"
        query = fields.assumed(default_query, "num_attention_heads", why=why)
        kv = fields.assumed(default_kv, "num_key_value_heads", why=why)
        return query, kv, fields.assumed(default_dim, "head_dim", why=why)
    query = fields.needed("num_attention_heads", "n_head", "n_heads")
    return query, _kv_heads(fields, query), _head_dim(fields, query)


def _kv_heads(fields: Fields, query: int) -> int:
    if fields.flag("multi_query") and not fields.flag("new_decoder_architecture"):
        return 1
    if fields.flag("multi_query_attention"):
        return fields.needed("multi_query_group_num")
    stated = fields.whole("num_key_value_heads", "num_kv_heads", "n_head_kv", "num_attention_groups")
    inner = fields.inner("attn_config")
    stated = stated or (inner.whole("kv_n_heads") if inner else None)
    if stated is not None and stated > query:
        raise fields.wrong("num_key_value_heads", f"is {stated}, more than the {query} query heads")
    return stated or query


def _head_dim(fields: Fields, query: int) -> int:
    stated = fields.whole("head_dim", "attention_head_dim", "kv_channels", "hidden_size_per_head")
    if stated is not None:
        return stated
    hidden = fields.needed("hidden_size", "n_embd", "d_model")
    if hidden % query:
        raise fields.wrong(
            "hidden_size", f"{hidden} is not a multiple of num_attention_heads {query}, and head_dim is not stated"
        )
    return hidden // query
