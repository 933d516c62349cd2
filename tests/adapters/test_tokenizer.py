"""Our ids are Hugging Face's, and texts may be cut where we cut them."""

from __future__ import annotations

import json
from array import array
from functools import cache

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken as HfToken
from tokenizers import models, normalizers, pre_tokenizers, processors

from kvroute.adapters.model_files import read_model
from kvroute.adapters.tokenizer import AddedToken, Tokenizer, TokenizerSpec, anchors_of
from kvroute.errors import ConfigError
from tests.data_files import conversations
from tests.tokenizer_files import FAMILIES, load_tokenizer, tokenizer_directory

pytestmark = pytest.mark.xdist_group("tokenizers")  # one process loads them
SLOW_TO_LOAD = {"gptoss": pytest.mark.slow}
BY_FAMILY = pytest.mark.parametrize(
    "family", [pytest.param(family, marks=SLOW_TO_LOAD.get(family, ())) for family in FAMILIES]
)
letters = st.text(st.characters(codec="utf-8"), max_size=40)
pieces = st.sampled_from(
    [
        "Hello world",
        "don't",
        " 1234567",
        "\n\n",
        "  ",
        "\t",
        "é",
        "e\u0301",
        "中文",
        "🙂🏽",
        "<",
        "|>",
        "<|",
        "｜",
        "_",
        "```py\n",
        "\u00a0",
    ]
)
texts = st.lists(letters | pieces, max_size=8).map("".join)
ONE_BY_ONE = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@cache
def reference(family):
    return tokenizers.Tokenizer.from_file(str(tokenizer_directory(family) / "tokenizer.json"))


def ids_of(family, text, special=False):
    """Hugging Face's ids, packed."""
    return array("I", reference(family).encode(text, add_special_tokens=special).ids).tobytes()


def made(directory, pre_tokenizer, *, special=(), normalizer=None, post_processor=None):
    """Write a small tokenizer and load it both ways."""
    alphabet = sorted([*pre_tokenizers.ByteLevel.alphabet(), " ", "▁"])
    vocabulary = {letter: number for number, letter in enumerate(alphabet)}
    made = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token=None))
    made.pre_tokenizer, made.normalizer = pre_tokenizer, normalizer
    made.add_tokens(list(special))
    if post_processor is not None:
        made.post_processor = post_processor(made)
    made.save(str(directory / "tokenizer.json"))
    return made, Tokenizer(read_model(directory))


@BY_FAMILY
@ONE_BY_ONE
@given(data=st.data())
def test_ids_are_those_of_hugging_face(family, data):
    """Any text, special tokens inside it or around it: the same ids."""
    tokenizer = load_tokenizer(family)
    inside = st.sampled_from(tokenizer.anchors)
    text = "".join(data.draw(st.lists(texts | inside, max_size=6)))
    special = data.draw(st.booleans())
    assert tokenizer.encode(text, add_special_tokens=special) == ids_of(family, text, special)


@pytest.mark.slow
@BY_FAMILY
@ONE_BY_ONE
@given(data=st.data())
def test_a_text_may_be_cut_before_any_anchor(family, data):
    """In each tokenizer, what stands before an anchor and what begins with it can be tokenised apart."""
    tokenizer = load_tokenizer(family)
    anchor = data.draw(st.sampled_from(tokenizer.anchors))
    inside = st.sampled_from(tokenizer.anchors)
    before, after = ("".join(data.draw(st.lists(texts | inside, max_size=4))) for _ in range(2))
    first, rest = tokenizer.encode_parts([before, anchor + after])
    assert first + rest == ids_of(family, before + anchor + after)


@BY_FAMILY
def test_recorded_conversations_have_the_ids_of_hugging_face(family):
    """Real dialogues, tool output and code, in fastokens, which loads all four families."""
    tokenizer = load_tokenizer(family)
    assert tokenizer.library == "fastokens"
    some = conversations("tau_airline_text_a")[:5] + conversations("swe_text_a")[:1]
    for text in ("\n".join(message["content"] or "" for message in messages) for messages in some):
        assert tokenizer.encode(text) == ids_of(family, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tau_airline_text_a", "swe_text_a"])
@BY_FAMILY
def test_all_recorded_messages_have_the_ids_of_hugging_face(family, name):
    """Every message of both workloads."""
    tokenizer = load_tokenizer(family)
    messages = {message["content"] or "" for messages in conversations(name) for message in messages}
    assert [text for text in messages if tokenizer.encode(text) != ids_of(family, text)] == []


def test_the_anchor_is_the_one_that_cuts_a_conversation_most_and_last():
    """The next turn goes on behind the last anchor; tokens that are no anchors do not count."""
    turns = "<|im_start|>user\nx<|im_end|>\n" * 3
    assert load_tokenizer("qwen3").anchor_for(turns + "<|im_start|>assistant\n") == "<|im_start|>"
    assert load_tokenizer("qwen3").anchor_for(turns) == "<|im_end|>"
    assert load_tokenizer("qwen3").anchor_for("no special tokens") is None


def token(content, **flags):
    return AddedToken(content, **flags)


@pytest.mark.parametrize(
    ("tokens", "anchors"),
    [
        ([token("<a>"), token("<b>")], ("<a>", "<b>")),
        ([token("<a>", lstrip=True)], ()),
        ([token("<a>", rstrip=True)], ()),
        ([token("<a>", single_word=True)], ()),
        ([token("<a>", normalized=True)], ()),
        ([token("word")], ()),
        ([token(" <a>")], ()),
        ([token("<a>"), token("<a><b>")], ()),
        ([token("<a>"), token("x<a")], ()),
        ([token("<a>"), token(">>")], (">>",)[:0]),
        ([token("<aba<")], ()),
        ([token("[INST]"), token("[/INST]")], ("[INST]", "[/INST]")),
    ],
)
def test_only_tokens_that_are_always_found_are_anchors(tokens, anchors):
    """Flags that touch neighbours, changes to the text before the search, and overlaps rule a token out."""
    assert anchors_of(TokenizerSpec(added_tokens=tuple(tokens), normalizer={"type": "NFC"})) == anchors


def test_a_normalizer_that_does_nothing_does_not_matter():
    """A token that is looked for in normalised text is an anchor where normalising changes nothing."""
    spec = TokenizerSpec(
        added_tokens=(token("<a>", normalized=True),), normalizer={"type": "Sequence", "normalizers": []}
    )
    assert anchors_of(spec) == ("<a>",)


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
@ONE_BY_ONE
@given(before=texts, after=texts)
def test_a_space_put_in_front_of_the_first_piece_stays_where_it_was(tmp_path_factory, scheme, before, after):
    """Tokenizers that prepend a metaspace can be cut too, because the later part begins with the anchor."""
    both = _metaspace(tmp_path_factory, scheme)
    hugging_face, ours = both
    first, rest = ours.encode_parts([before, "<a>" + after])
    assert (
        first + rest == array("I", hugging_face.encode(f"{before}<a>{after}", add_special_tokens=False).ids).tobytes()
    )


MADE = {}


def _metaspace(tmp_path_factory, scheme):
    if scheme not in MADE:
        pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
        anchor = HfToken("<a>", special=True, normalized=False)
        MADE[scheme] = made(tmp_path_factory.mktemp(scheme), pre_tokenizer, special=[anchor])
    return MADE[scheme]


def test_what_fastokens_does_not_load_is_left_to_tokenizers(tmp_path):
    """A model type that only Hugging Face's library knows works as well, with its ids."""
    made = tokenizers.Tokenizer(models.WordLevel({"hello": 0, "?": 1}, unk_token="?"))
    made.pre_tokenizer, made.normalizer = pre_tokenizers.Whitespace(), normalizers.Lowercase()
    made.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(read_model(tmp_path))
    assert (tokenizer.library, list(array("I", tokenizer.encode("Hello you")))) == ("tokenizers", [0, 1])


def test_special_tokens_are_put_around_a_text_as_the_post_processor_says(tmp_path):
    """Beginning and end of a text, for completions; inside a chat the template has written them already."""
    special = [HfToken(text, special=True, normalized=False) for text in ("<s>", "</s>")]

    def around(library):
        pairs = [(text, library.token_to_id(text)) for text in ("<s>", "</s>")]
        return processors.TemplateProcessing(single="<s> $A </s>", special_tokens=pairs)

    hugging_face, ours = made(
        tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False), special=special, post_processor=around
    )
    for text in ("hi", "", "<s>hi"):
        assert list(array("I", ours.encode(text, add_special_tokens=True))) == hugging_face.encode(text).ids
        assert list(array("I", ours.encode(text))) == hugging_face.encode(text, add_special_tokens=False).ids


def test_tokens_of_the_configuration_are_added_as_hugging_face_adds_them(tmp_path):
    """A special token that only tokenizer_config.json names is one id, the next free one, and an anchor."""
    hugging_face, _ = made(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<end>"}))
    ours = Tokenizer(read_model(tmp_path))
    assert list(array("I", ours.encode("<end>"))) == [hugging_face.get_vocab_size()]
    assert ours.anchors == ("<end>",)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    """Engines tokenise whole prompts, whatever the tokenizer was saved with."""
    hugging_face, _ = made(tmp_path, pre_tokenizers.ByteLevel(add_prefix_space=False))
    hugging_face.enable_truncation(3)
    hugging_face.enable_padding(length=50)
    hugging_face.save(str(tmp_path / "tokenizer.json"))
    assert len(Tokenizer(read_model(tmp_path)).encode("abcdefgh")) == 8 * 4


def test_a_file_that_is_no_tokenizer_is_refused(tmp_path):
    """The error names the file."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer(read_model(tmp_path))
