"""Our tokens beside the engine's own, on every recorded conversation."""

from __future__ import annotations

import array
from typing import Any

import aiohttp
import pytest

from kvroute.adapters.tokens import WHOLE, PromptReader, open_reader
from kvroute.kv.chain import root_of
from kvroute.kv.prompt import ChatPrompt
from tests.vllm.conversations import Messages, read_conversations
from tests.vllm.engines import SERVED_NAME

EVERY = {"tau_airline_text_a": 1, "swe_text_a": 6}  # the engine takes long for long prompts: not each of their turns


def prompts_of(conversation: Messages, every: int) -> list[Messages]:
    """Return the prompts of a conversation's calls, every so many, the last one always."""
    calls = [at for at, message in enumerate(conversation) if message["role"] == "assistant"]
    return [conversation[:at] for at in sorted({*calls[::every], calls[-1]})]


async def by_us(reader: PromptReader, messages: Messages) -> list[int]:
    prompt = await reader.read(ChatPrompt(messages), block_size=WHOLE, root=root_of(SERVED_NAME))
    return list(array.array("I", prompt.tail))


async def by_engine(session: aiohttp.ClientSession, messages: Messages) -> list[int]:
    async with session.post("/tokenize", json={"model": SERVED_NAME, "messages": messages}) as answer:
        body: dict[str, Any] = await answer.json()
        assert answer.status == 200, body
        tokens: list[int] = body["tokens"]
        return tokens


@pytest.mark.parametrize("name", EVERY)
async def test_our_tokens_are_the_engines(engines, model_dir, name):
    """Rendering and tokenising give the engine's ids for each prompt, however much of it was known before."""
    reader = await open_reader(str(model_dir), None, SERVED_NAME, None)
    await reader.start()
    different, count = [], 0
    async with aiohttp.ClientSession(engines.urls[0]) as session:
        for number, conversation in enumerate(read_conversations(name)):
            for messages in prompts_of(conversation, EVERY[name]):
                count += 1
                if await by_us(reader, messages) != await by_engine(session, messages):
                    different.append((number, len(messages)))
    await reader.close()
    assert (reader.mode, different, count > 100) == ("local", [], True)
