"""Which layer of a model does what: full attention, a window, a chunk, a recurrent state, or nothing to keep.

Published configurations say it in a dozen ways, from a word a layer to an interval, and some leave it to the code of
the model family. The rules below are tried from the most explicit to the least; the first that applies decides. What
only the family's code says (FAMILY_PATTERN, FAMILY_EVERY_LAYER) is as in the configuration classes of the transformers
library, release 5, and is noted where it was used.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from msgspec import Struct

from kvroute.sizing.fields import Fields, shown

LAYERS_LIMIT = 2_048  # the deepest published models have under 200


class Kind(Struct, frozen=True):
    """What a layer keeps. A window or chunk belongs to its attention."""

    form: Literal["attention", "state", "both", "nothing"] = "attention"
    window: int | None = None
    chunk: int | None = None
    heads_in_group: int | None = None  # query heads a KV head, where it differs from layer to layer
    compressed: int | None = None  # tokens that one further entry stands for, beside the window (DeepSeek V4)
    indexed: bool = False  # an indexer chooses among those entries


FULL, STATE, BOTH, NOTHING = Kind(), Kind("state"), Kind("both"), Kind("nothing")

WORDS: dict[str, Kind | Literal["window", "chunk"]] = {
    **dict.fromkeys(
        ("full_attention", "attention", "global", "global_attention", "full", "indexed_attention", "minimax_m3_sparse"),
        FULL,
    ),
    **dict.fromkeys(("deepseek_sparse_attention", "qwen_sparse_attention"), FULL),
    **dict.fromkeys(("sliding_attention", "sliding_window_attention", "sliding", "local", "local_attention"), "window"),
    **dict.fromkeys(("chunked_attention", "chunked"), "chunk"),
    **dict.fromkeys(("linear_attention", "mamba", "mamba1", "mamba2", "recurrent", "linear", "conv"), STATE),
    **dict.fromkeys(("hybrid", "parallel"), BOTH),
    **dict.fromkeys(("moe", "mlp", "dense", "sparse", "no_op"), NOTHING),
}
LETTERS = {"M": STATE, "*": FULL, "-": NOTHING, "E": NOTHING}  # Nemotron-H
FAMILY_PATTERN = {  # every n-th layer is full, the others keep to the window
    "gemma2": 2,
    "gemma3": 6,
    "gemma3_text": 6,
    "gemma3n_text": 5,
    "gpt_oss": 2,
    "cohere2": 4,
    "exaone4": 4,
    "olmo3": 4,
}
FAMILY_EVERY_LAYER = frozenset({"mistral", "mixtral", "phi3", "phimoe", "starcoder2"})
FAMILY_SWITCHED_OFF = frozenset(
    {"qwen2", "qwen2_moe", "qwen2_vl_text", "qwen2_5_vl_text", "qwen3", "qwen3_moe", "smollm3"}
)
FAMILY_INTERVAL = {  # every n-th layer is full attention, the others are linear
    "qwen3_next": 4,
    "qwen3_5_text": 4,
    "qwen3_5_moe_text": 4,
}


def kinds_of(fields: Fields) -> list[Kind]:
    """Return what each layer keeps, in order.

    Raises:
        ConfigError: the number of layers is missing or absurd, or a layer's type is not known.
    """
    rules: tuple[Callable[[Fields, int], list[Kind] | None], ...] = (
        _by_compression,
        _by_words,
        _by_marks,
        _by_indices,
        _by_period,
        _by_interval,
        _by_chunks,
        _by_blocks,
    )
    letters = fields.word("hybrid_override_pattern")
    if letters:
        return [_kind_of_letter(fields, letter) for letter in letters[:LAYERS_LIMIT]]
    layers = _count(fields)
    kinds = next((found for rule in rules if (found := rule(fields, layers)) is not None), None)
    return _without_shared(fields, kinds if kinds is not None else _by_window(fields, layers))


def _count(fields: Fields) -> int:
    """Number of layers: as stated, or as have a word each (Nemotron-H as transformers release 5 writes it)."""
    names = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
    words = fields.items("layers_block_type")
    if words and not any(fields.has(name) for name in names):
        return min(len(words), LAYERS_LIMIT)
    return fields.needed(*names, most=LAYERS_LIMIT)


def _kind_of_letter(fields: Fields, letter: str) -> Kind:
    if letter not in LETTERS:
        raise fields.wrong("hybrid_override_pattern", f"has the letter {shown(letter)}; known are {' '.join(LETTERS)}")
    return LETTERS[letter]


def _by_compression(fields: Fields, layers: int) -> list[Kind] | None:
    """DeepSeek V4: every layer has a window, and most keep older tokens compressed, by few with an indexer or by many.

    Said by a ratio for each layer (0 or 1: window only) or, by transformers release 5, by a word and a ratio a word.
    """
    if fields.word("model_type") != "deepseek_v4":
        return None
    window = fields.needed("sliding_window")
    rates = fields.inner("compress_rates") or Fields({}, f"{fields.path}compress_rates.", fields.notes)
    few = rates.whole("compressed_sparse_attention") or fields.whole("compress_rate_csa") or 4
    many = rates.whole("heavily_compressed_attention") or fields.whole("compress_rate_hca") or 128
    ratios: Sequence[Any] = fields.items("compress_ratios") or ()
    name = "compress_ratios"
    if not ratios:
        name, known = (
            "layer_types",
            {"sliding_attention": 0, "compressed_sparse_attention": few, "heavily_compressed_attention": many},
        )
        ratios = [known.get(word, word) if isinstance(word, str) else word for word in fields.items(name) or ()]
    return [_compressed(fields, name, ratio, window, few) for ratio in _exactly(fields, name, ratios, layers)]


def _compressed(fields: Fields, name: str, ratio: object, window: int, few: int) -> Kind:
    if isinstance(ratio, bool) or not isinstance(ratio, int) or not 0 <= ratio <= LAYERS_LIMIT:
        raise fields.wrong(name, f"has {shown(ratio)}, where a ratio from 0 to {LAYERS_LIMIT:,} was expected")
    return Kind(window=window, compressed=ratio if ratio > 1 else 0, indexed=ratio == few)


def _by_words(fields: Fields, layers: int) -> list[Kind] | None:
    """A word for each layer."""
    for name in ("layer_types", "layers_block_type", "attention_layer_types"):
        words = fields.items(name)
        if words:
            return [_kind_of_word(fields, name, word) for word in _exactly(fields, name, words, layers)]
    return None


def _kind_of_word(fields: Fields, name: str, word: object) -> Kind:
    if not isinstance(word, str):
        raise fields.wrong(name, f"has {shown(word)}, where the name of a layer's type was expected")
    kind = WORDS.get(word)
    if kind is None:
        fields.notes.append(
            f"{fields.path}{name} has the type {shown(word)}, which is not known: counted as full attention, "
            "which is the most that attention keeps"
        )
        return FULL
    if kind == "window":
        return Kind(window=fields.needed("sliding_window", "sliding_window_size", "window_size"))
    if kind == "chunk":
        return Kind(chunk=fields.needed("attention_chunk_size"))
    return kind


def _exactly(fields: Fields, name: str, values: Sequence[Any], layers: int) -> Sequence[Any]:
    if len(values) < layers:
        raise fields.wrong(name, f"has {len(values)} entries for {layers} layers")
    if len(values) > layers:
        fields.notes.append(
            f"{name} has {len(values)} entries for {layers} layers: the rest (draft layers) is not counted"
        )
    return values[:layers]


def _by_marks(fields: Fields, layers: int) -> list[Kind] | None:
    """A 0 or 1 for each layer: MiniMax marks full attention among linear, MiMo marks windows."""
    marks = fields.items("attn_type_list")
    if marks:
        return [FULL if mark == 1 else STATE for mark in _exactly(fields, "attn_type_list", marks, layers)]
    marks = fields.items("hybrid_layer_pattern")
    if marks:
        window = Kind(window=fields.needed("sliding_window", "sliding_window_size"))
        return [window if mark == 1 else FULL for mark in _exactly(fields, "hybrid_layer_pattern", marks, layers)]
    return None


def _by_indices(fields: Fields, layers: int) -> list[Kind] | None:
    """A list of the layers with attention among recurrent ones."""
    linear = fields.inner("linear_attn_config")
    if linear is not None and linear.has("full_attn_layers"):
        chosen = {index - 1 for index in _indices(linear, "full_attn_layers")}  # Kimi Linear counts from one
    else:
        name = next((name for name in ("attn_layer_indices", "full_attn_idxs") if fields.has(name)), None)
        if name is None:
            return None
        chosen = set(_indices(fields, name))
    return [FULL if layer in chosen else STATE for layer in range(layers)]


def _indices(fields: Fields, name: str) -> list[int]:
    values = fields.items(name) or []
    if not all(isinstance(value, int) for value in values):
        raise fields.wrong(name, "must be a list of layer numbers")
    return list(values)


def _by_period(fields: Fields, layers: int) -> list[Kind] | None:
    """Jamba: attention every `attn_layer_period` layers, from `attn_layer_offset` on; Mamba elsewhere."""
    period = fields.whole("attn_layer_period")
    if period is None:
        return None
    offset = fields.needed("attn_layer_offset", least=0)
    return [FULL if layer % period == offset else STATE for layer in range(layers)]


def _by_interval(fields: Fields, layers: int) -> list[Kind] | None:
    """Every n-th layer is full attention among linear ones."""
    family = fields.word("model_type") or ""
    interval = fields.whole("full_attention_interval")
    if interval is None and family in FAMILY_INTERVAL:
        interval = fields.assumed(
            FAMILY_INTERVAL[family], "full_attention_interval", why=f"as the {family} family does"
        )
    if interval is None:
        return None
    return [STATE if (layer + 1) % interval else FULL for layer in range(layers)]


def _by_chunks(fields: Fields, layers: int) -> list[Kind] | None:
    """Llama 4: layers with rotary positions attend within a chunk, the others to everything."""
    if not (fields.word("model_type") or "").startswith("llama4") or not fields.has("attention_chunk_size"):
        return None
    chunk = Kind(chunk=fields.needed("attention_chunk_size"))
    marks = fields.items("no_rope_layers")
    if marks:
        return [chunk if mark else FULL for mark in _exactly(fields, "no_rope_layers", marks, layers)]
    interval = fields.assumed(4, "no_rope_layer_interval", why="as the llama4 family does")
    return [chunk if (layer + 1) % interval else FULL for layer in range(layers)]


def _by_blocks(fields: Fields, layers: int) -> list[Kind] | None:
    """Pruned Nemotron models: an object a layer, whose attention may be left out."""
    blocks = fields.items("block_configs")
    if not blocks:
        return None
    return [_kind_of_block(fields, block) for block in _exactly(fields, "block_configs", blocks, layers)]


def _kind_of_block(fields: Fields, block: object) -> Kind:
    attention = Fields(block, "block_configs.", fields.notes).inner("attention") if isinstance(block, dict) else None
    if attention is None:
        raise fields.wrong("block_configs", "must hold an object with `attention` for every layer")
    if attention.flag("no_op") or attention.flag("replace_with_linear"):
        return NOTHING
    return Kind(heads_in_group=attention.whole("n_heads_in_group"))


def _by_window(fields: Fields, layers: int) -> list[Kind]:
    """A window, with or without a word on which layers keep to it."""
    interleaved = fields.data.get("interleaved_sliding_window")
    if isinstance(interleaved, list) and interleaved:
        cycle = [FULL if value is None else Kind(window=_window(fields, value)) for value in interleaved[:LAYERS_LIMIT]]
        return [cycle[layer % len(cycle)] for layer in range(layers)]
    size = fields.whole("interleaved_sliding_window", "sliding_window", "sliding_window_size", least=0)
    if not size or fields.flag("use_sliding_window") is False:
        return [FULL] * layers
    return _spread(fields, layers, Kind(window=size))


def _window(fields: Fields, value: object) -> int:
    return Fields({"interleaved_sliding_window": value}, fields.path, fields.notes).needed("interleaved_sliding_window")


def _spread(fields: Fields, layers: int, window: Kind) -> list[Kind]:
    family = fields.word("model_type") or ""
    for name in ("sliding_window_pattern", "_sliding_window_pattern"):
        pattern = fields.data.get(name)
        if isinstance(pattern, str) and pattern and set(pattern) <= set("LG"):
            return [window if pattern[layer % len(pattern)] == "L" else FULL for layer in range(layers)]
    every = fields.whole("sliding_window_pattern", "_sliding_window_pattern")
    if every is None and family in FAMILY_PATTERN:
        every = fields.assumed(FAMILY_PATTERN[family], "sliding_window_pattern", why=f"as the {family} family does")
    if every is not None:
        return [window if (layer + 1) % every else FULL for layer in range(layers)]
    if fields.flag("use_sliding_window"):
        first = fields.needed("max_window_layers", least=0)
        return [window if layer >= first else FULL for layer in range(layers)]
    if family in FAMILY_SWITCHED_OFF:
        return [FULL] * layers
    if family in FAMILY_EVERY_LAYER:
        fields.notes.append(f"sliding_window is {window.window:,} in every layer, as the {family} family does")
        return [window] * layers
    fields.notes.append(
        f"sliding_window is {window.window:,} and no field says which layers keep to it: every layer is counted as "
        "full, which is the most it can be. State layer_types or sliding_window_pattern for the exact size"
    )
    return [FULL] * layers


def _without_shared(fields: Fields, kinds: list[Kind]) -> list[Kind]:
    """Layers that read another layer's cache keep none of their own."""
    shared = fields.whole("num_kv_shared_layers", least=0) or 0
    if shared >= len(kinds) > 0 and shared:
        raise fields.wrong("num_kv_shared_layers", f"must be under the number of layers, {len(kinds)}")
    if shared:
        return kinds[: len(kinds) - shared] + [NOTHING] * shared
    factor = fields.whole("cla_share_factor") if fields.flag("use_cla") else None
    if factor is not None:
        return [NOTHING if layer % factor else kind for layer, kind in enumerate(kinds)]
    return kinds
