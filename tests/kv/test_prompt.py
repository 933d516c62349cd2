"""What a prompt can hit at most."""

from __future__ import annotations

import json

import msgspec
import pytest
from msgspec import Raw

from kvroute.kv.chain import Root, chain_of, tokens_of
from kvroute.kv.prompt import ChatPrompt, Prompt, WrittenChat


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (40, 2)])
def test_the_last_token_is_always_computed(tokens, blocks):
    """A prompt of exactly k blocks can hit k - 1 of them; one token more and it can hit k."""
    chain = chain_of(tokens_of(range(tokens)), 16, Root(1))
    assert Prompt(chain, tokens, 16).hit_limit_blocks == blocks


def test_a_chain_that_ends_before_media_limits_what_can_be_hit():
    """Blocks behind the end of the chain are never counted, however long the prompt is."""
    assert Prompt(chain_of(tokens_of(range(32)), 16, Root(1)), 4_000, 16, exact=False).hit_limit_blocks == 2


def written(messages: list[object], tools: object = None) -> WrittenChat:
    raw = [Raw(json.dumps(message).encode()) for message in messages]
    return WrittenChat(raw, Raw(json.dumps(tools).encode()), ChatPrompt([], reasoning_effort="low"))


BEYOND = WrittenChat([Raw(b'{"a": 1e999}')], Raw(b"null"), ChatPrompt([]))


def test_a_written_chat_is_its_values():
    """Messages, tools and all other fields come back as values."""
    message, tool = {"role": "user", "content": "é"}, {"type": "function"}
    chat = written([message, message], [tool])
    assert chat.decoded() == ChatPrompt([message, message], [tool], reasoning_effort="low")
    assert written([message]).decoded().tools is None
    assert chat.size_bytes == 2 * len(json.dumps(message)) + len(json.dumps([tool]))


@pytest.mark.parametrize("chat", [written([5]), written([{}], [5]), written([{}], {}), BEYOND])
def test_a_written_chat_that_is_none_is_refused(chat: WrittenChat):
    """What is no object, or holds a number that no decoder takes, has no values."""
    with pytest.raises(msgspec.DecodeError):
        chat.decoded()
