"""Tokenizers that Hugging Face rebuilds from the vocabulary alone."""

from __future__ import annotations

import msgspec
import pytest

from kvroute.adapters.rebuilt import rebuild, rebuilding_class
from tests.tokenizer_files import tokenizer_directory

pytestmark = pytest.mark.xdist_group("tokenizers")  # one process loads them


@pytest.mark.parametrize(
    ("model_type", "named", "rebuilt_by"),
    [
        ("qwen2", "PreTrainedTokenizerFast", "Qwen2Tokenizer"),
        ("qwen3", "Qwen2TokenizerFast", "Qwen2Tokenizer"),
        ("qwen3", "PreTrainedTokenizerFast", None),
        (None, "Qwen2Tokenizer", "Qwen2Tokenizer"),
        ("llama", "LlamaTokenizerFast", None),
        (None, None, None),
    ],
)
def test_the_model_type_wins_over_the_named_class(model_type, named, rebuilt_by):
    """Some types are always rebuilt, others only where their files name the class."""
    assert rebuilding_class(model_type, named) == rebuilt_by


def test_published_files_agree_with_the_class():
    """Qwen's own tokenizer.json says what the class builds, so it is left as it is."""
    definition = (tokenizer_directory("qwen3") / "tokenizer.json").read_bytes()
    assert rebuild(definition, "Qwen2Tokenizer") is definition


@pytest.mark.parametrize(("name", "module"), [("Qwen2Tokenizer", "qwen2"), ("Qwen3_5Tokenizer", "qwen3_5")])
def test_what_is_rebuilt_is_what_hugging_face_builds(name, module):
    """Normalizer and pre-tokenizer of another definition are replaced by those of the class, and nothing else is."""
    import transformers  # here, because it takes seconds and few tests need it

    built = getattr(transformers.models, module), name
    backend = msgspec.json.decode(getattr(*built)(vocab={"<|endoftext|>": 0}, merges=[]).backend_tokenizer.to_str())
    given = {"model": {"type": "BPE"}, "normalizer": None, "pre_tokenizer": {"type": "ByteLevel"}}
    made = msgspec.json.decode(rebuild(msgspec.json.encode(given), name))
    splits = [tokenizer["pre_tokenizer"]["pretokenizers"][0] for tokenizer in (made, backend)]
    assert (made["model"], made["normalizer"], splits[0]) == (given["model"], backend["normalizer"], splits[1])
