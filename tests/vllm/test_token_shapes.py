"""Our tokens beside the engine's own, on every shape of request."""

from __future__ import annotations

import array

import aiohttp
import pytest

from kvroute.adapters.tokens import WHOLE, PromptReader, open_reader
from kvroute.kv.chain import root_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt
from tests.vllm.engines import SERVED_NAME

USER = {"role": "user", "content": "hi"}
PARAMETERS = {"type": "object", "properties": {"z": {"type": "string"}}}
TOOL = {"cache": 1, "function": {"parameters": PARAMETERS, "name": "n", "x": 5, "strict": True}, "type": "function"}


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def call(arguments: str) -> dict[str, object]:
    calls = [{"type": "function", "id": "1", "function": {"name": "f", "arguments": arguments}}]
    return {"role": "assistant", "tool_calls": calls}


def chats(*shapes: list[object]) -> list[dict[str, object]]:
    return [{"messages": messages} for messages in shapes]


OPEN = {"continue_final_message": True, "add_generation_prompt": False}
SHAPES = [
    *chats(
        [USER],
        [{"role": "system", "content": "s"}, USER],
        [{"role": "user"}, {"role": "weird", "content": "w", "name": "bob", "foo": 1}],
        [{"role": "user", "content": "<|im_end|>\n<|im_start|>system\nx"}],
        [{"role": "user", "content": "é e\u0301 \u0000 \ufeff \r\n\n 日本 1234567890"}],
        [{"role": "user", "content": [text("a"), text(""), "b"]}],
        [{"role": "system", "content": [text("x-anthropic-billing-header: 1\nrest"), text("b")]}, USER],
        [{"role": "system", "content": "x-anthropic-billing-header: 1"}, USER],
        [{"role": "developer", "content": "d"}, USER, {"role": "system", "content": "later"}, USER],
        [USER, call('{"b": 1, "a": "ü<&>"}'), {"role": "tool", "tool_call_id": "1", "content": [text("x"), text("y")]}],
        [USER, call("{broken"), {"role": "tool", "tool_call_id": "1", "content": "r"}],
        [USER, call("[1]") | {"content": "Sure: "}, USER],
        [USER, {"role": "assistant", "content": "done", "tool_calls": [], "reasoning": "why"}, USER],
    ),
    {"messages": [USER], "tools": [TOOL, {"type": "function", "function": {"name": "k"}}]},
    {"messages": [{"role": "system", "content": "s"}, USER], "tools": [TOOL]},
    {"messages": [USER, {"role": "assistant", "content": "The answer is"}], **OPEN},
    {"messages": [USER, {"role": "assistant", "content": "The answer is "}], **OPEN},
    {"messages": [USER, {"role": "assistant", "content": [text("The answer"), text(" is")]}], **OPEN},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [USER], "add_special_tokens": True},
    {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False, "x": 1}},
    {"messages": [USER], "chat_template_kwargs": {"add_generation_prompt": False}},
    {"messages": [USER], "chat_template_kwargs": {"tools": [{"a": 1}]}, "tools": [TOOL]},
]
REFUSED = [
    *chats([], [{"content": "no role"}], [{"role": "user", "content": [{"type": "zzz"}]}]),
    {"messages": [USER], "chat_template": "{{ 1 }}"},
    {"messages": [USER], "chat_template_kwargs": {"chat_template": "{{ 1 }}"}},
]


@pytest.fixture
async def reader(model_dir):
    reader = await open_reader(str(model_dir), None, SERVED_NAME, None)
    await reader.start()
    yield reader
    await reader.close()


@pytest.fixture
async def session(replica_url):
    async with aiohttp.ClientSession(replica_url) as session:
        yield session


async def both(session: aiohttp.ClientSession, reader: PromptReader, source: ChatPrompt | TextPrompt, **body: object):
    """Return the engine's tokens (None where it refuses) and our prompt."""
    prompt = await reader.read(source, block_size=WHOLE, root=root_of(SERVED_NAME))
    async with session.post("/tokenize", json={"model": SERVED_NAME, **body}) as answer:
        return (await answer.json())["tokens"] if answer.status == 200 else None, prompt


@pytest.mark.parametrize("body", SHAPES)
async def test_chats_of_every_shape_have_the_engines_tokens(session, reader, body):
    """Parts, tools, calls, roles, open final messages and template variables give the engine's ids."""
    theirs, ours = await both(session, reader, ChatPrompt(**body), **body)
    assert (list(array.array("I", ours.tail)), ours.exact) == (theirs, True)


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("prompt", ["", "hello", " x<|im_end|> y", "é e\u0301"])
async def test_texts_have_the_engines_tokens(session, reader, prompt, special):
    """Completions give the engine's ids, with and without special tokens."""
    fields = {"prompt": prompt, "add_special_tokens": special}
    theirs, ours = await both(session, reader, TextPrompt(prompt, special), **fields)
    assert list(array.array("I", ours.tail)) == theirs


@pytest.mark.parametrize("body", REFUSED)
async def test_what_the_engine_refuses_is_never_called_exact(session, reader, body):
    """A chat without tokens of the engine's has none of ours either, only text chunks."""
    theirs, ours = await both(session, reader, ChatPrompt(**body), **body)
    assert (theirs, ours.exact) == (None, False)


async def test_the_engine_agrees_when_the_reader_starts(session, model_dir):
    """A reader beside the engine's own files compares itself with the engine and stays local."""

    async def ask(path: str, body: bytes) -> bytes:
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
            return await answer.read()

    reader = await open_reader("auto", str(model_dir), SERVED_NAME, ask)
    await reader.start()
    await reader.close()
    assert (reader.mode, reader.why) == ("local", f"the model's root, {model_dir}")


async def test_without_files_the_engine_is_asked(session):
    """Chats and texts read through /tokenize have the ids that the engine gives directly."""

    async def ask(path: str, body: bytes) -> bytes:
        async with session.post(path, data=body, headers={"Content-Type": "application/json"}) as answer:
            return await answer.read()

    reader = await open_reader("auto", None, SERVED_NAME, ask, environ={"HF_HUB_CACHE": "/nonexistent"})
    await reader.start()
    for body in SHAPES:
        theirs, ours = await both(session, reader, ChatPrompt(**body), **body)
        assert list(array.array("I", ours.tail)) == theirs
    await reader.close()
    assert (reader.mode, reader.approximated) == ("replica", 0)
