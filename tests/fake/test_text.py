"""The simulated model's tokenizer, template and answers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import BadRequest
from kvroute.fake.text import END_OF_TURN, MARKERS, answer, decode, encode, ids_of, piece_of, render
from kvroute.kv.chain import TOKEN_BYTES, TokenBytes, tokens_of

TEXT = st.text(st.one_of(st.sampled_from(" \n\0abcdefg.,<|>é漢🙂"), st.characters()), max_size=60)
MESSAGE = st.builds(lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), TEXT)


@given(TEXT)
def test_decoding_gives_the_text_back(text):
    """Any text survives being tokenised, markers and lone surrogates included."""
    assert decode(encode(text)) == text
    assert decode(encode(MARKERS[0] + text + MARKERS[1])) == MARKERS[0] + text + MARKERS[1]


@given(TEXT, TEXT)
def test_text_on_the_two_sides_of_a_marker_is_tokenised_independently(left, right):
    """A marker is a border that no token crosses."""
    assert encode(left + MARKERS[1] + right) == encode(left) + encode(MARKERS[1]) + encode(right)


@given(TEXT, st.integers(0, 60))
def test_a_text_cut_between_two_tokens_keeps_the_tokens_before_the_cut(text, count):
    """What was generated so far tokenises to what was generated so far."""
    kept = TokenBytes(encode(text)[: count * TOKEN_BYTES])
    if not any(marker in text for marker in MARKERS):
        assert encode(decode(kept)) == kept


@given(st.lists(MESSAGE, min_size=1, max_size=4), st.lists(MESSAGE, min_size=1, max_size=2))
def test_a_conversation_that_grows_keeps_its_prefix(earlier, later):
    """The tokens of a conversation without its generation prompt begin those of any continuation."""
    start = encode(render(earlier, add_generation_prompt=False))
    assert encode(render(earlier + later)).startswith(start)


@given(st.lists(MESSAGE, min_size=1, max_size=3), st.integers(1, 80), st.booleans())
def test_an_answer_fed_back_gives_the_ids_that_were_generated(messages, max_tokens, endless):
    """The next turn's prompt begins with this turn's prompt and the tokens that were said, so they can be hit."""
    prompt = encode(render(messages))
    said = answer(prompt, seed=1, index=0, max_tokens=max_tokens, min_tokens=0, endless=endless)
    content = "".join(piece_of(token) for token in ids_of(said) if token != END_OF_TURN)
    more = [{"role": "assistant", "content": content}, {"role": "user", "content": "Go on"}]
    following = encode(render(messages + more))
    assert following.startswith(prompt + said)


def test_words_keep_the_space_before_them():
    """English text costs about a token for each four characters."""
    assert [piece_of(token) for token in ids_of(encode("Hello world, it is me"))] == [
        *("Hell", "o", " wor", "ld,", " it", " is", " me"),
    ]


@given(st.integers(0, 2**32 - 1))
def test_any_id_below_the_vocabulary_has_some_text(token):
    """A client may make ids up; those that name no text show as the replacement character."""
    assert 1 <= len(decode(tokens_of([token]))) <= max(map(len, MARKERS))


def test_answers_depend_on_seed_prompt_and_index_and_on_nothing_else():
    """The same question gets the same answer; another index, seed or prompt another one."""

    def said(prompt: str = "a", seed: int = 0, index: int = 0) -> str:
        return decode(answer(encode(prompt), seed=seed, index=index, max_tokens=20, min_tokens=0, endless=False))

    assert said() == said()
    assert len({said(), said("b"), said(seed=1), said(index=1)}) == 4


@given(st.integers(1, 600), st.integers(0, 600), st.booleans(), st.integers(0, 1000))
def test_an_answer_has_the_length_that_was_asked_for(max_tokens, min_tokens, endless, seed):
    """It never passes max_tokens, reaches min_tokens where it may, and ends its turn only where it stops by itself."""
    said = ids_of(
        answer(encode("Hi"), seed=seed, index=0, max_tokens=max_tokens, min_tokens=min_tokens, endless=endless)
    )
    assert min(min_tokens, max_tokens) <= len(said) <= max_tokens
    assert list(said).count(END_OF_TURN) == (said[-1] == END_OF_TURN)
    if endless or said[-1] != END_OF_TURN:
        assert len(said) == max_tokens


def test_a_conversation_is_written_the_chatml_way():
    """Tools and documents come first, then each turn, then the beginning of the answer."""
    messages = [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "you"}]}]
    assert render(messages, tools=[{"a": 1}], documents=[{"b": 2}]) == (
        '<|im_start|>system\n# Tools\n[{"a":1}]<|im_end|>\n<|im_start|>system\n# Documents\n[{"b":2}]<|im_end|>\n'
        "<|im_start|>user\nHi\nyou<|im_end|>\n<|im_start|>assistant\n"
    )
    assert render(messages, continue_final_message=True) == "<|im_start|>user\nHi\nyou"
    called = [{"role": "assistant", "content": None, "tool_calls": [{"id": "x"}]}]
    assert render(called, add_generation_prompt=False) == '<|im_start|>assistant\n\n[{"id":"x"}]<|im_end|>\n'


@pytest.mark.parametrize("content", [5, [{"type": "image_url", "image_url": {"url": "x"}}], [5]])
def test_content_that_is_not_text_is_refused(content):
    """The model reads text only, and says so."""
    with pytest.raises(BadRequest):
        render([{"role": "user", "content": content}])
