"""Prompts without a tokenizer."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.approximate import MEDIA_TOKENS, approximate, estimate_tokens
from kvroute.kv.chain import Root, TokenBytes, blocks_in, chain_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt
from tests.data_files import calls_of, conversations

ROOT = Root(5)
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}

contents = st.text(max_size=30) | st.none() | st.lists(st.text(max_size=9) | st.just(IMAGE), max_size=3)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool"]), "content": contents},
    optional={"tool_calls": st.just([CALL])},
)


def prompt(turns, **fields):
    return approximate(ChatPrompt(messages=turns, **fields), 4, ROOT)


@given(st.lists(messages, max_size=6), st.lists(messages, max_size=3))
def test_a_conversation_that_grew_begins_with_its_former_chain(turns, more):
    """The chain of the first turns is a prefix of the chain of all turns, whatever the messages hold."""
    before = prompt(turns)
    assert prompt(turns + more).chain[: len(before.chain)] == before.chain


def test_recorded_conversations_keep_their_prefix():
    """Every call of real dialogues extends the chain of the call before it, nearly to its end."""
    for calls in map(calls_of, conversations("tau_airline_text_a")[:10]):
        chains = [prompt(call).chain for call in calls]
        assert all(after.startswith(before) for before, after in pairwise(chains))
        assert blocks_in(chains[-1]) > 300


@pytest.mark.parametrize(
    "other",
    [
        ChatPrompt(messages=[{"role": "system", "content": "hi" * 40}]),
        ChatPrompt(messages=[{"role": "user", "content": "hi" * 40}], tools=[{"type": "function"}]),
        ChatPrompt(messages=[{"role": "user", "content": "hi" * 40}], reasoning_effort="high"),
        ChatPrompt(messages=[{"role": "user", "content": "hi" * 40}], chat_template_kwargs={"enable_thinking": False}),
        TextPrompt("hi" * 40),
    ],
)
def test_what_changes_the_beginning_of_the_prompt_shares_nothing(other):
    """Roles, tools and settings that templates put first are hashed first."""
    plain = prompt([{"role": "user", "content": "hi" * 40}])
    assert approximate(other, 4, ROOT).chain[:8] != plain.chain[:8]


def test_the_chain_ends_before_media_and_the_length_counts_them():
    """What stands behind an image may be anywhere; its tokens are a guess."""
    text = {"role": "user", "content": "a" * 64}
    before, after = prompt([text]), prompt([text, {"role": "user", "content": [IMAGE, IMAGE]}, text])
    assert after.chain[: len(before.chain)] == before.chain
    assert blocks_in(after.chain) <= blocks_in(before.chain) + 1
    assert after.tokens > 2 * MEDIA_TOKENS
    assert estimate_tokens(ChatPrompt(messages=[text])) == before.tokens


def test_pseudo_tokens_never_meet_real_ones():
    """The same four bytes as a token id have another hash: the roots differ."""
    made = approximate(TextPrompt("abcd" * 16), 4, ROOT)
    assert (made.exact, made.tokens) == (False, 16)
    assert made.chain != chain_of(TokenBytes(b"abcd" * 16), 4, ROOT)


def test_half_of_a_surrogate_pair_is_text_like_any_other():
    """JSON can carry it; it must not break routing."""
    assert prompt([{"role": "user", "content": "\ud800" * 40}], tools=[{"name": "\ud800"}]).tokens > 0
