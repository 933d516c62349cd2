"""Chats read by what is new in them: the same prompts as chats read whole, whatever was read before."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import Raw

from kvroute.adapters.conversation import CannotRender
from kvroute.adapters.known_turns import ENTRY_BYTES
from kvroute.adapters.local_tokens import INLINE_BYTES_MAX, LocalTokens
from kvroute.adapters.render import Renderer
from kvroute.kv.chain import Root
from kvroute.kv.prompt import ChatPrompt, Prompt, WrittenChat
from tests.tokenizer_files import load_templates, load_tokenizer
from tests.vllm.make_model import CHAT_TEMPLATE

pytestmark = pytest.mark.xdist_group("tokenizers")  # one process loads the tokenizers
ROOT, LIMIT = Root(3), 8 << 20
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is false %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
SPOKEN = "{% for m in messages %}{{ m.role }}: {{ m.content }}<|im_end|>{% endfor %}"  # begins with no added token
PARTS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% for c in m.content %}{{ c.text }}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"  # a foot without an anchor
)
MODELS = {
    "chatml": ("qwen3", CHATML),
    "tools": ("qwen3", CHAT_TEMPLATE),
    "parts": ("qwen3", PARTS),
    "spoken": ("qwen3", SPOKEN),
    "llama": ("llama3_1", None),
}
LONG = "word " * 150
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TOOLS = [{"type": "function", "function": {"name": "f", "description": "é", "parameters": {"type": "object"}}}]
CALL = {"type": "function", "id": "1", "function": {"name": "f", "arguments": '{"a": "\\ud800"}'}}

texts = st.sampled_from(
    ["", "hi", "é\n", LONG, "<|im_start|>user\n", "<|im_end|>", "中文 " * 90, "x-anthropic-billing-header: 1\nb"]
)
contents = (
    st.none()
    | texts
    | st.lists(st.builds(lambda text: {"type": "text", "text": text}, texts) | st.just(IMAGE), max_size=2)
)
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant", "tool", "developer", 5]), "content": contents},
    optional={"tool_calls": st.sampled_from([[], [CALL], [5]]), "name": st.just("n")},
)
fields = st.fixed_dictionaries(
    {},
    optional={
        "add_generation_prompt": st.booleans(),
        "continue_final_message": st.booleans(),
        "add_special_tokens": st.booleans(),
        "chat_template_kwargs": st.sampled_from(
            [{}, {"enable_thinking": False}, {"tools": [1]}, {"bos_token": "<|im_end|>"}]
        ),
        "reasoning_effort": st.sampled_from(["none", "high"]),
    },
)


def written(chat: list[Any], tools: Any = None, **others: Any) -> WrittenChat:
    return WrittenChat(
        [Raw(json.dumps(message).encode()) for message in chat],
        Raw(json.dumps(tools).encode()),
        ChatPrompt([], **others),
    )


@cache
def local_of(name: str) -> LocalTokens:
    family, template = MODELS[name]
    renderer = Renderer(
        load_templates(family) if template is None else {"default": template}, {"bos_token": "<|im_start|>"}
    )
    return LocalTokens(load_tokenizer(family), renderer, LIMIT)


async def whole(local: LocalTokens, chat: WrittenChat, block_size: int, root: Root) -> Prompt | None:
    try:
        return await local.read(chat.decoded(), block_size, root)
    except CannotRender:
        return None


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=120, deadline=None)
@given(data=st.data())
async def test_what_is_read_by_turns_is_what_is_read_whole(name, data):
    """Any chats in any order, growing or not, under any fields, root and block size."""
    local = local_of(name)
    chat = data.draw(st.lists(messages, min_size=1, max_size=4))
    others = data.draw(fields)
    for _ in range(data.draw(st.integers(1, 4))):
        tools = data.draw(st.sampled_from([None, TOOLS]))
        source = written(chat, tools, **others)
        block_size, root = data.draw(st.sampled_from([1, 16])), Root(data.draw(st.integers(0, 1)))
        prompt = await local.read_turns(source, block_size, root)
        assert prompt in (None, await whole(local, source, block_size, root))
        chat = [*chat[: data.draw(st.integers(1, len(chat)))], *data.draw(st.lists(messages, max_size=3))]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["chatml", "tools", "llama"])
async def test_a_grown_chat_is_read_by_turns(name):
    """Plain turns of a template that takes them one by one need nothing else, from the first message on."""
    local = LocalTokens(local_of(name).tokenizer, local_of(name)._renderer, LIMIT)
    chat = [{"role": "system", "content": LONG}]
    for turn in range(6):
        chat += [{"role": "user", "content": LONG + str(turn)}, {"role": "assistant", "content": "a"}]
        prompt = await local.read_turns(written(chat[:-1]), 16, ROOT)
        assert prompt == await whole(local, written(chat[:-1]), 16, ROOT)
    assert (local.turns.hits, local.turns.misses) == (5, 1)
    other = await local.read_turns(written([chat[0], {"role": "user", "content": "other"}]), 16, ROOT)
    assert (local.turns.hits, other.tokens > 150) == (6, True)  # chats share their first message


@pytest.mark.parametrize("name", ["spoken", "parts"])
async def test_texts_that_may_not_be_cut_are_read_whole(name):
    """Where messages, or what stands behind them, begin with no added token, their tokens depend on what precedes."""
    assert await local_of(name).read_turns(written([{"role": "user", "content": LONG}]), 16, ROOT) is None


@pytest.mark.parametrize(
    "source",
    [
        written([{"role": "user", "content": [IMAGE]}]),
        written([{"role": "developer", "content": "d"}]),
        written([{"role": "user", "content": "q"}], continue_final_message=True, add_generation_prompt=False),
        written([{"role": "user", "content": "q"}], chat_template="x"),
        written([{"role": "user"}, 5]),
        written([{"role": "user"}], tools=[5]),
        WrittenChat([Raw(b'{"role": "user", "content": "\xff"}')], Raw(b"null"), ChatPrompt([])),
    ],
)
async def test_what_only_the_whole_chat_tells_is_not_read_by_turns(source):
    """Media, merged messages, an open final message, what is no message: another way has to read or refuse them."""
    local = local_of("chatml")
    assert await local.read_turns(source, 16, ROOT) is None


async def test_known_messages_are_not_decoded():
    """Behind a known start, messages are told by their bytes alone: another spelling is another message."""
    local = local_of("chatml")
    first, second = {"role": "user", "content": LONG + "known"}, {"role": "assistant", "content": "b"}
    await local.read_turns(written([first]), 16, ROOT)
    hits = local.turns.hits
    prompt = await local.read_turns(written([first, second]), 16, ROOT)
    spaced = WrittenChat(
        [Raw(json.dumps(first, indent=1).encode()), Raw(json.dumps(second).encode())], Raw(b"null"), ChatPrompt([])
    )
    assert await local.read_turns(spaced, 16, ROOT) == prompt
    assert local.turns.hits == hits + 1


async def test_long_new_messages_give_the_same_in_the_pool():
    """A text of more than the event loop may take is the same prompt with threads and without."""
    chat = [{"role": "user", "content": LONG * 80}, {"role": "assistant", "content": LONG * 80}]
    assert len(LONG * 80) > INLINE_BYTES_MAX
    local = LocalTokens(local_of("chatml").tokenizer, local_of("chatml")._renderer, LIMIT)
    local.start()
    assert await local.read_turns(written(chat), 16, ROOT) == await local_of("chatml").read_turns(
        written(chat), 16, ROOT
    )
    local.close()


async def test_memory_is_bounded():
    """Any number of chats, with any tools, stays within the limit."""
    limit = 200_000
    local = LocalTokens(local_of("chatml").tokenizer, local_of("chatml")._renderer, 2 * limit)
    for number in range(300):
        tools = [{"type": "function", "function": {"name": f"f{number}"}}]
        await local.read_turns(written([{"role": "user", "content": LONG + str(number)}], tools), 16, ROOT)
        await local.read_turns(written([{"role": "user", "content": LONG + str(number)}]), 16, Root(number))
        assert local.turns.used_bytes <= limit
    assert local.turns.used_bytes > 20 * ENTRY_BYTES
