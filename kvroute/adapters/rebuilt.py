"""Tokenizers of which `transformers` takes only the vocabulary from tokenizer.json.

Since version 5 some of its tokenizer classes build the normalizer and the pre-tokenizer themselves, and for some model
types such a class is used whatever tokenizer_config.json names (`models/auto/tokenization_auto.py`, 5.19 to 5.24). The
published files of these models agree with the classes; a model with the same type and a tokenizer of its own does not.
"""

from __future__ import annotations

from typing import Any

import msgspec

CLASS_OF_TYPE = {
    "qwen2": "Qwen2Tokenizer",
    "qwen3_5": "Qwen3_5Tokenizer",
    "qwen3_5_moe": "Qwen3_5Tokenizer",
    "qwen3_5_moe_text": "Qwen3_5Tokenizer",
}  # these types win over the class that the files name
DEFAULT_TOKENS = dict.fromkeys(("eos_token", "unk_token", "pad_token"), "<|endoftext|>")  # of these classes
LETTERS_OF_CLASS = {"Qwen2Tokenizer": (r"\p{L}", r"\p{L}"), "Qwen3_5Tokenizer": (r"[\p{L}\p{M}]", r"\p{L}\p{M}")}


def rebuilding_class(model_type: str | None, named_class: str | None) -> str | None:
    """Return the class that rebuilds this model's tokenizer; None where tokenizer.json is taken as it is."""
    name = CLASS_OF_TYPE.get(model_type or "") or (named_class or "").removesuffix("Fast")
    return name if name in LETTERS_OF_CLASS else None


def rebuild(definition: bytes, class_name: str) -> bytes:
    """Return a tokenizer.json with the normalizer and pre-tokenizer of the class, unchanged where it has them already.

    Raises:
        msgspec.MsgspecError: the definition is not a JSON object.
    """
    tokenizer = msgspec.json.decode(definition, type=dict[str, Any])
    parts = {"normalizer": {"type": "NFC"}, "pre_tokenizer": _pre_tokenizer(*LETTERS_OF_CLASS[class_name])}
    if all(_without_offsets(tokenizer.get(name)) == _without_offsets(part) for name, part in parts.items()):
        return definition
    return msgspec.json.encode({**tokenizer, **parts})


def _pre_tokenizer(letter: str, letters: str) -> dict[str, Any]:
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?" + letter + r"+|\p{N}| ?[^\s" + letters + r"\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [split, bytes_]}


def _without_offsets(part: Any) -> Any:
    """Return a part without what concerns only the offsets of tokens in the text."""
    if isinstance(part, dict):
        return {name: _without_offsets(value) for name, value in part.items() if name != "trim_offsets"}
    return [_without_offsets(value) for value in part] if isinstance(part, list) else part
