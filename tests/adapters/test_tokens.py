"""The reader: which door a prompt takes, and that it always gets an answer."""

from __future__ import annotations

import json
from array import array

import pytest
from msgspec import Raw

from kvroute.adapters.replica_tokens import ReplicaTokens
from kvroute.adapters.tokens import PROBE_CHAT, PROBE_TEXT, WHOLE, PromptReader, open_reader
from kvroute.errors import ConfigError, ReplicaBroke
from kvroute.kv.chain import Root, chain_of, tokens_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt, TokenPrompt, WrittenChat
from tests.small_model import write_small_model

ROOT, BLOCK = Root(3), 4
NOWHERE = {"HF_HUB_CACHE": "/nonexistent"}
HI = ChatPrompt(messages=[{"role": "user", "content": "hi"}])
REFUSED = ChatPrompt(messages=[])


def asker(tokens=None, error=None):
    """A replica's /tokenize: equal tokens for everything, or an error."""

    async def ask(path, body):
        if error:
            raise error
        return json.dumps({"tokens": tokens}).encode()

    return ask


async def ids_of(reader, source):
    """Return all tokens of a prompt: with blocks that nothing fills they are all in its tail."""
    return (await reader.read(source, block_size=WHOLE, root=ROOT)).tail


def beside(model):
    """A replica that has the same files."""

    async def ask(path, body):
        reader = await open_reader(str(model), None, "m", None)
        fields = json.loads(body)
        source = TextPrompt(fields["prompt"]) if "prompt" in fields else ChatPrompt(messages=fields["messages"])
        return json.dumps({"tokens": list(array("I", await ids_of(reader, source)))}).encode()

    return ask


async def read(reader, source):
    return await reader.read(source, block_size=BLOCK, root=ROOT)


@pytest.fixture
def model(tmp_path):
    return str(write_small_model(tmp_path / "model"))


@pytest.fixture
async def opened():
    """Open and start readers, and close them at the end."""
    readers = []

    async def open_(setting="auto", root=None, ask=None):
        readers.append(await open_reader(setting, root, "m", ask, environ=NOWHERE))
        await readers[-1].start()
        return readers[-1]

    yield open_
    for reader in readers:
        await reader.close()


async def test_a_directory_that_agrees_with_the_replica_is_used(opened, model):
    """Files beside, and a replica that tokenises alike: prompts are read here, and the reason names the place."""
    reader = await opened(model, ask=beside(model))
    assert (reader.mode, reader.why) == ("local", f"as configured, {model}")
    prompt = await read(reader, HI)
    assert (prompt.exact, prompt.chain) == (True, chain_of(await ids_of(reader, HI), BLOCK, ROOT))


async def test_a_root_on_this_machine_is_used_without_being_named(opened, model):
    """`auto` takes the model's root, and says so; without a replica nothing is compared."""
    reader = await opened(root=model)
    assert (reader.mode, "the model's root" in reader.why) == ("local", True)


async def test_a_replica_that_tokenises_otherwise_is_believed(opened, model):
    """Files of another model beside are not used, neither for chats nor for texts."""
    reader = await opened(model, ask=asker(tokens=[1, 2, 3, 4, 5]))
    assert (reader.mode, reader.fingerprint) == ("replica", "replica")
    assert "tokenises otherwise" in reader.why
    for source in (HI, TextPrompt("x")):
        assert await ids_of(reader, source) == tokens_of([1, 2, 3, 4, 5])


async def test_files_are_believed_where_nothing_is_compared(model):
    """Told not to compare, a reader keeps to the files, whatever a replica would say."""
    reader = await open_reader(model, None, "m", asker(tokens=[1, 2, 3, 4, 5]), environ=NOWHERE)
    await reader.start(compares=False)
    assert reader.mode == "local"
    assert await ids_of(reader, HI) != tokens_of([1, 2, 3, 4, 5])
    await reader.close()


async def test_a_replica_with_another_template_renders_the_chats(opened, model):
    """Equal tokenizers but another template: texts are read here, chats by the replica."""
    same = beside(model)

    async def ask(path, body):
        return json.dumps({"tokens": [9]}).encode() if b"messages" in body else await same(path, body)

    reader = await opened(model, ask=ask)
    assert reader.mode == "replica"
    assert await ids_of(reader, HI) == tokens_of([9])
    assert len(await ids_of(reader, TextPrompt("hi"))) == 2 * 4


async def test_a_silent_replica_changes_nothing(opened, model):
    """Files are used although nothing could be compared, and the reason says that."""
    reader = await opened(model, ask=asker(error=ReplicaBroke("500", replica="r")))
    assert (reader.mode, "not compared" in reader.why) == ("local", True)


async def test_without_files_the_replica_is_asked(opened):
    """Whole prompts are remembered; hits and misses are counted."""
    reader = await opened(root="org/m", ask=asker(tokens=[1, 2, 3, 4, 5]))
    prompts = [await read(reader, HI) for _ in range(3)]
    assert (reader.mode, reader.cache_hits, reader.cache_misses) == ("replica", 2, 1)
    assert {prompt.tokens for prompt in prompts} == {5}
    assert prompts[0].exact


@pytest.mark.parametrize("config", [{"model_type": "gpt_oss"}, {"architectures": ["DeepseekV32ForCausalLM"]}])
async def test_chats_of_models_that_do_not_render_through_jinja_are_asked(opened, tmp_path, config):
    """Their completions need no template, so they are still tokenised here."""
    model = write_small_model(tmp_path, **config)
    reader = await opened(str(model), ask=asker(error=ReplicaBroke("404", replica="r")))
    assert (reader.mode, ", but its engine renders" in reader.why) == ("replica", True)
    assert (await read(reader, TextPrompt("hi"))).exact
    assert not (await read(reader, HI)).exact


async def test_no_files_and_no_answer_still_give_a_prompt(opened):
    """Per request, text chunks stand in for tokens, and that is counted."""
    reader = await opened(ask=asker(error=ReplicaBroke("404", replica="r")))
    prompt = await read(reader, HI)
    assert (reader.mode, prompt.exact, prompt.tokens > 0) == ("replica", False, True)
    assert (reader.ask_failures, reader.approximated) == (1, 1)


async def test_none_means_text_chunks_without_asking(opened):
    """The setting `none` needs no files and bothers no replica."""
    reader = await opened("none", ask=asker(error=AssertionError("asked")))
    assert (reader.mode, reader.fingerprint, reader.why) == ("approximate", "approximate", "as configured")
    assert not (await read(reader, HI)).exact


async def test_a_chat_that_the_template_refuses_is_left_to_the_engine(opened, model):
    """It becomes text chunks, so that the engine can say in its own words what is wrong."""
    reader = await opened(model)
    assert not (await read(reader, REFUSED)).exact
    assert reader.approximated == 1


async def test_a_template_of_the_request_is_asked_for(opened, model):
    """Only engines with a flag take it; what a replica says is then the prompt."""
    same = beside(model)

    async def ask(path, body):
        return json.dumps({"tokens": [7]}).encode() if b"chat_template" in body else await same(path, body)

    reader = await opened(model, ask=ask)
    assert reader.mode == "local"
    assert await ids_of(reader, ChatPrompt(messages=HI.messages, chat_template="x")) == tokens_of([7])


@pytest.mark.parametrize("setting", ["none", "auto"])
async def test_token_ids_of_the_client_need_no_door(opened, setting):
    """They are the prompt, in every mode."""
    prompt = await read(await opened(setting), TokenPrompt(tokens_of(range(10))))
    assert (prompt.tokens, prompt.exact, prompt.chain) == (10, True, chain_of(tokens_of(range(10)), BLOCK, ROOT))


async def test_a_named_directory_without_a_tokenizer_is_an_error(tmp_path):
    """A typing mistake must not become another mode; `auto` takes a broken file for none."""
    with pytest.raises(ConfigError, match="holds no"):
        await open_reader(str(tmp_path), None, "m", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="is not a tokenizer"):
        await open_reader(str(tmp_path), None, "m", None)
    assert (await open_reader("auto", str(tmp_path), "m", None)).mode == "approximate"


async def test_fingerprints_tell_tokenizers_apart(opened, tmp_path):
    """Routers with equal files share an index, others do not."""
    a, b, c = (write_small_model(tmp_path / name) for name in "abc")
    (c / "chat_template.jinja").write_text("another template")
    one, equal, other = [(await opened(str(directory))).fingerprint for directory in (a, b, c)]
    assert one == equal
    assert len({one, other, (await opened("none")).fingerprint}) == 3


async def test_an_answer_extends_only_what_was_read_here(opened, model):
    """Text chunks and replicas' tokens are not extended: nothing false is claimed."""
    local, other = await opened(model), await opened("none")
    prompt, chunks = await read(local, HI), await read(other, HI)
    assert await local.extend(prompt, "hello", 6, ROOT) is not None
    assert await other.extend(chunks, "hello", 2, ROOT) is None
    assert await local.extend(chunks, "hello", 2, ROOT) is None


async def test_a_reader_can_be_closed_unstarted_and_twice(model):
    """Shutting down must not depend on how far starting got."""
    reader = await open_reader(model, None, "m", None)
    await reader.close()
    await reader.start()
    await reader.close()
    await reader.close()


def test_the_probes_show_differences():
    """What is compared with a replica has turns, a system message, other scripts, spaces and numbers."""
    reader = PromptReader(None, ReplicaTokens("m", asker(), 1), mode="replica", why="")
    assert (reader.mode, len(PROBE_CHAT.messages) > 3, len(PROBE_TEXT.text) > 300) == ("replica", True, True)


def as_written(chat, **fields):
    return WrittenChat([Raw(json.dumps(message).encode()) for message in chat], Raw(b"null"), ChatPrompt([], **fields))


@pytest.mark.parametrize("setting", ["model", "none"])
@pytest.mark.parametrize("fields", [{}, {"chat_template": "x"}, {"continue_final_message": True}])
async def test_a_written_chat_is_read_like_its_values(model, setting, fields):
    """Through every door, the prompt does not depend on whether the messages came decoded."""
    reader = await open_reader(model if setting == "model" else "none", None, "m", asker([7]))
    for chat in (HI.messages, [*HI.messages, {"role": "assistant", "content": "hello"}]):
        source = as_written(chat, **fields)
        assert await read(reader, source) == await read(reader, source.decoded())


async def test_a_written_chat_that_cannot_be_decoded_has_a_size(model):
    """Nothing is known of it but its length; the engine says what is wrong with it."""
    reader = await open_reader(model, None, "m", None)
    prompt = await read(reader, as_written([*HI.messages, 5, "x" * 390]))
    assert (prompt.chain, prompt.exact, reader.approximated) == (b"", False, 1)
    assert prompt.tokens > 100


async def test_numbers_of_any_size_are_read(model):
    """Template variables may be numbers that no machine word holds."""
    reader = await open_reader(model, None, "m", None)
    assert (await read(reader, as_written(HI.messages, chat_template_kwargs={"n": 10**30}))).exact
