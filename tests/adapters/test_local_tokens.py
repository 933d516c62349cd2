"""Prompts through the model's own files: the same ids and chains whatever was read before and wherever it runs."""

from __future__ import annotations

import json
from array import array
from functools import cache

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.adapters.conversation import CannotRender
from kvroute.adapters.local_tokens import INLINE_BYTES_MAX, LocalTokens
from kvroute.adapters.model_files import read_model
from kvroute.adapters.render import Renderer
from kvroute.adapters.tokenizer import Tokenizer
from kvroute.kv.chain import Root, chain_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt
from tests.data_files import calls_of, conversations
from tests.tokenizer_files import WITH_TEMPLATE, load_tokenizer, tokenizer_directory

pytestmark = pytest.mark.xdist_group("tokenizers")  # one process loads the tokenizers
WHOLE = 1 << 24  # a block size that no prompt fills
ROOT, LIMIT = Root(3), 8 << 20
LONG = " ".join(f"word{number}" for number in range(8_000))  # more than may run on the event loop
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}

contents = st.sampled_from(["hi", "", "é\n", " x", "<|im_start|>user\n", "word " * 150, "中文 " * 90, "<|im_end|>"])
turns = st.lists(st.tuples(st.sampled_from(["system", "user", "assistant"]), contents), min_size=1, max_size=8)


@cache
def open_renderer(family):
    files = read_model(tokenizer_directory(family))
    return Renderer(files.templates, files.variables)


def open_local(family):
    return LocalTokens(load_tokenizer(family), open_renderer(family), LIMIT)


def chat(*turns, **fields):
    return ChatPrompt(messages=[{"role": role, "content": content} for role, content in turns], **fields)


@pytest.fixture(scope="module")
def qwen():
    local = open_local("qwen3")
    local.start()
    yield local
    local.close()


def ids_of(text, special=False, family="qwen3"):
    return load_tokenizer(family).encode(text, add_special_tokens=special)


@pytest.mark.parametrize(
    ("family", "anchor"),
    [("qwen3", "<|im_start|>"), ("llama3_1", "<|end_header_id|>"), ("deepseek_v3", "<｜Assistant｜>")],
)
def test_conversations_are_cut_where_the_next_turn_goes_on(family, anchor):
    """The anchor is the token of the model's own template that stands before the answer."""
    assert open_local(family).anchor == anchor


@pytest.mark.parametrize("family", WITH_TEMPLATE)
async def test_growing_conversations_have_the_ids_of_their_whole_text(family):
    """Each call of real dialogues, read after the call before it, is what Hugging Face makes of its whole text."""
    local = open_local(family)
    reference = tokenizers.Tokenizer.from_file(str(tokenizer_directory(family) / "tokenizer.json"))
    renderer = open_renderer(family)
    for messages in conversations("tau_airline_text_a")[:6]:
        texts = [{"role": message["role"], "content": message["content"] or ""} for message in messages]
        for call in calls_of(texts):
            source = ChatPrompt(messages=call)
            prompt = await local.read(source, 16, ROOT)
            whole = array("I", reference.encode(renderer.render(source).text, add_special_tokens=False).ids).tobytes()
            assert (prompt.tokens, prompt.exact) == (len(whole) // 4, True)
            assert prompt.chain + prompt.tail == chain_of(whole, 16, ROOT) + whole[len(whole) // 64 * 64 :]
            assert (await local.read(source, WHOLE, ROOT)).tail == whole
    assert local.known.hits > local.known.misses


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
async def test_a_prompt_does_not_depend_on_what_was_read_before(qwen, data):
    """Any conversations in any order, under any root and block size: each is as if it had been the only one."""
    renderer = open_renderer("qwen3")
    for _ in range(data.draw(st.integers(1, 4))):
        source = chat(*data.draw(turns))
        block_size, root = data.draw(st.sampled_from([16, 32])), Root(data.draw(st.integers(0, 2)))
        try:
            prompt = await qwen.read(source, block_size, root)
        except CannotRender:
            continue
        alone = ids_of(renderer.render(source).text)
        assert prompt.chain == chain_of(alone, block_size, root)
        assert prompt.tail == alone[len(prompt.chain) // 8 * block_size * 4 :]


async def test_long_new_texts_give_the_same_in_the_pool(qwen):
    """A text of more than the event loop may take is the same prompt with threads and without."""
    source = chat(("system", LONG), ("user", "hi"))
    assert len(LONG) > INLINE_BYTES_MAX
    unstarted = open_local("qwen3")
    assert await qwen.read(source, 16, ROOT) == await unstarted.read(source, 16, ROOT)


async def test_completions_get_the_special_tokens_around_them():
    """Llama's completions begin with its beginning-of-text token unless the client says no."""
    local = open_local("llama3_1")
    for special in (True, False):
        prompt = await local.read(TextPrompt("hello", special), WHOLE, ROOT)
        assert prompt.tail == ids_of("hello", special, "llama3_1")
    assert len(ids_of("hello", True, "llama3_1")) == len(ids_of("hello", False, "llama3_1")) + 4


async def test_the_chain_ends_at_the_last_anchor_before_media(qwen):
    """Text, then an image: everything up to the message that holds the image is certain, the length is a guess."""
    plain = await qwen.read(chat(("system", LONG), ("user", "q")), 16, ROOT)
    mixed = await qwen.read(chat(("system", LONG), ("user", [{"type": "text", "text": "q"}, IMAGE])), 16, ROOT)
    assert (mixed.exact, plain.exact) == (False, True)
    assert plain.chain.startswith(mixed.chain)
    assert len(mixed.chain) > len(plain.chain) - 16
    assert mixed.tokens > 1_000


@pytest.mark.parametrize("source", [TextPrompt("\ud800"), chat(("user", "\ud800"))])
async def test_half_of_a_surrogate_pair_has_no_tokens(qwen, source):
    """No tokenizer takes it, so the prompt cannot be known."""
    with pytest.raises(CannotRender):
        await qwen.read(source, 16, ROOT)


@pytest.mark.parametrize(("counted", "held"), [(0, -1), (1, 0)])
async def test_an_answer_extends_the_chain_by_what_the_cache_holds(qwen, counted, held):
    """The last sampled token is never fed back: without a counted end-of-turn token one token less is held."""
    prompt = await qwen.read(chat(("user", "q" * 50)), 1, ROOT)
    answer = "The answer is 42, <|im_end|> isn't it?"
    completion = len(ids_of(answer)) // 4 + counted
    chain = await qwen.extend(prompt, answer, completion, ROOT)
    whole = (await qwen.read(chat(("user", "q" * 50)), WHOLE, ROOT)).tail + ids_of(answer)
    assert chain == chain_of(whole[: len(whole) + held * 4], 1, ROOT)


@pytest.mark.parametrize(("answer", "more"), [("hello there", 2), ("hello there", -1), ("\ud800", 0)])
async def test_an_answer_that_does_not_fit_its_count_extends_nothing(qwen, answer, more):
    """Tokens that were sampled but are not in the text (reasoning, tool calls) must not be guessed at."""
    prompt = await qwen.read(chat(("user", "q")), 1, ROOT)
    assert await qwen.extend(prompt, answer, 2 + more, ROOT) is None


async def test_the_next_turn_begins_with_what_an_answer_extended(qwen):
    """The chain claimed after an answer is what the next prompt of the conversation asks for."""
    turns = [("system", "You are brief. " * 20), ("user", "What is it?")]
    answer = "It is what it is, " * 20
    prompt = await qwen.read(chat(*turns, chat_template_kwargs={"enable_thinking": True}), 16, ROOT)
    chain = await qwen.extend(prompt, answer, len(ids_of(answer)) // 4 + 1, ROOT)
    following = await qwen.read(chat(*turns, ("assistant", answer), ("user", "Why?")), 16, ROOT)
    assert chain is not None
    assert following.chain.startswith(chain)
    assert len(chain) > len(prompt.chain)


async def test_tokenizers_does_the_work_where_fastokens_cannot(tmp_path):
    """The slower library gives prompts, cuts and chains in the same way."""
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"?": 0, "hello": 1, "you": 2}, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.add_special_tokens(["<|turn|>"])
    made.save(str(tmp_path / "tokenizer.json"))
    template = "{% for m in messages %}<|turn|>{{ m.content }} {% endfor %}<|turn|>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    files = read_model(tmp_path)
    local = LocalTokens(Tokenizer(files), Renderer(files.templates, {}), LIMIT)
    local.start()
    turns = [("user", "hello you " * 300)]
    for count in (1, 2, 3):
        prompt = await local.read(chat(*turns * count), WHOLE, ROOT)
        assert list(array("I", prompt.tail)) == [3, *[1, 2] * 300] * count + [3]
    local.close()
    assert (local.tokenizer.library, local.known.hits) == ("tokenizers", 2)


async def test_the_pace_of_a_tokenizer_is_learnt(qwen):
    """Slow texts are sent to the pool sooner than quick ones are kept out of it, and never without a bound."""
    before = qwen._byte_s
    qwen._byte_s = 1.0  # as if nothing could be tokenised here
    assert not qwen._is_short(1)
    for number in range(200):
        await qwen.read(TextPrompt(f"{number} " + LONG[:2_000], False), 16, ROOT)
    assert qwen._byte_s < 1.0
    qwen._byte_s = 0.0
    assert not qwen._is_short(INLINE_BYTES_MAX + 1)
    await qwen.read(TextPrompt(LONG[:2_000] + "quick", False), 16, ROOT)
    assert qwen._byte_s > 0.0
    qwen._byte_s = before
