"""Chats become the text that engines tokenise."""

from __future__ import annotations

import json

import pytest

from kvroute.adapters.conversation import CannotRender
from kvroute.adapters.model_files import read_model
from kvroute.adapters.render import Rendered, Renderer
from kvroute.kv.prompt import ChatPrompt
from tests.data_files import conversations
from tests.tokenizer_files import WITH_TEMPLATE, tokenizer_directory

pytestmark = pytest.mark.xdist_group("tokenizers")  # one process loads them

TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</{{ m.role }}>{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.content %}"
    "{{ '<image/>' if c.type == 'image' else c.text }}{% endfor %}</{{ m.role }}>{% endfor %}"
)
IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
TOOL = {
    "type": "function",
    "function": {"name": "n", "description": "d", "parameters": {"type": "object", "properties": {}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "n", "arguments": '{"q": "ü<&>"}'}}
CHATS = {
    "plain": [{"role": "user", "content": "hi"}],
    "system": [{"role": "system", "content": "s"}, {"role": "user", "content": " hi\n"}],
    "turns": [{"role": role, "content": role * 3} for role in ("system", "user", "assistant", "user")],
    "call": [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "1", "content": "r"},
    ],
}


def user(content):
    return [{"role": "user", "content": content}]


def render(source, messages, **fields):
    return Renderer({"default": source}, {"bos_token": "<s>"}).render(ChatPrompt(messages=messages, **fields)).text


@pytest.fixture(scope="module", params=WITH_TEMPLATE)
def both(request):
    """Our renderer and Hugging Face's tokenizer for the same files."""
    import transformers  # here, because it takes seconds and few tests need it

    transformers.logging.set_verbosity_error()
    directory = tokenizer_directory(request.param)
    files = read_model(directory)
    return Renderer(files.templates, files.variables), transformers.AutoTokenizer.from_pretrained(directory)


def theirs(tokenizer, messages, **fields):
    """Hugging Face's rendering of a chat whose tool calls have objects for arguments, as engines pass them."""
    messages = json.loads(json.dumps(messages))
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return tokenizer.apply_chat_template(messages, tokenize=False, **fields)


@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("chat", CHATS)
def test_chats_render_as_hugging_face_renders_them(both, chat, prompt, tools):
    """System or none, turns, tool calls, with and without tools: the same text, or both refuse."""
    renderer, tokenizer = both
    try:
        text = theirs(tokenizer, CHATS[chat], tools=tools, add_generation_prompt=prompt)
    except Exception:
        text = None
    source = ChatPrompt(messages=CHATS[chat], tools=tools, add_generation_prompt=prompt)
    try:
        ours = renderer.render(source).text
    except CannotRender:
        ours = None
    assert ours == text


def test_recorded_conversations_render_as_hugging_face_renders_them(both):
    """Real agent dialogues with a long system prompt: the same text."""
    renderer, tokenizer = both
    for messages in conversations("tau_airline_text_a")[:20]:
        texts = [{"role": message["role"], "content": message["content"] or ""} for message in messages]
        ours = renderer.render(ChatPrompt(messages=texts))
        assert ours == Rendered(theirs(tokenizer, texts, add_generation_prompt=True))


@pytest.mark.parametrize("content", ["The answer is", "The answer is ", " a\n"])
def test_a_final_message_is_continued_as_hugging_face_does(both, content):
    """The text ends where the final message ends, with its own spaces if the template keeps them."""
    renderer, tokenizer = both
    messages = [*user("q"), {"role": "assistant", "content": content}]
    fields = {"continue_final_message": True, "add_generation_prompt": False}
    assert renderer.render(ChatPrompt(messages=messages, **fields)).text == theirs(tokenizer, messages, **fields)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({}, "True||||[]"),
        ({"add_generation_prompt": False}, "False||||[]"),
        ({"reasoning_effort": "high"}, "True|high|True||[]"),
        ({"reasoning_effort": "none"}, "True|none|False||[]"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": False}}, "True|low|False||[]"),
        ({"chat_template_kwargs": {"enable_thinking": False, "reasoning_effort": "x"}}, "True|x|False||[]"),
        ({"chat_template_kwargs": {"add_generation_prompt": False, "bos_token": "B"}}, "True|||B|[]"),
        ({"documents": [{"text": "d"}], "chat_template_kwargs": {"documents": []}}, 'True||||[{"text": "d"}]'),
    ],
)
def test_the_bodys_fields_reach_the_template(fields, text):
    """Fields of the body win over chat_template_kwargs; reasoning effort switches thinking unless the user did."""
    source = (
        "{{ add_generation_prompt }}|{{ reasoning_effort }}|{{ enable_thinking }}|"
        "{{ bos_token if bos_token != '<s>' else '' }}|{{ documents or [] | tojson }}"
    )
    assert render(source.replace("documents or []", "(documents or [])"), user("x"), **fields) == text


def test_tools_choose_their_template_and_pass_as_the_engine_passes_them():
    """A model with a template for tools uses it when there are tools, and sees the schema's fields only."""
    renderer = Renderer({"default": "no tools", "tool_use": "{{ tools[0] | tojson }}"}, {})
    [plain, tools] = [renderer.render(ChatPrompt(messages=user("x"), tools=tools)).text for tools in (None, [TOOL])]
    assert (plain, json.loads(tools)) == ("no tools", TOOL)


def test_developer_messages_need_a_template_that_knows_them():
    """Where the template does not mention the role, the text is a system message."""
    messages = [{"role": "developer", "content": "d"}, *user("u")]
    assert render(TURNS, messages) == "<system>d</system><user>u</user>"
    assert render(TURNS + "{# 'developer' #}", messages) == "<developer>d</developer><user>u</user>"


@pytest.mark.parametrize(
    ("source", "content", "text"),
    [
        (PARTS, [{"type": "text", "text": "see "}, IMAGE, {"type": "text", "text": "!"}], "<user>a</user><user>see "),
        (PARTS, [IMAGE, IMAGE], "<user>a</user><user>"),
        (TURNS, [{"type": "text", "text": "see "}, IMAGE], "<user>a</user><user>"),
    ],
)
def test_the_text_ends_before_the_first_media_item(source, content, text):
    """Up to there the text is certain; in string form placeholders come before the message's own text."""
    chat = ChatPrompt(messages=[*user("a"), *user(content), *user("behind")])
    assert Renderer({"default": source}, {}).render(chat) == Rendered(text, is_whole=False)


def test_text_that_a_template_puts_first_because_of_media_is_not_taken_for_certain():
    """Only what stands in both renderings, with the item and with the mark in its place, is kept."""
    source = "{% if messages[0].content[0].type == 'image' %}vision {% else %}text {% endif %}" + PARTS
    chat = ChatPrompt(messages=user([IMAGE]))
    assert Renderer({"default": source}, {}).render(chat).text == ""


@pytest.mark.parametrize(
    ("source", "fields", "reason"),
    [
        (TURNS, {"chat_template": "x"}, "own template"),
        (TURNS, {"chat_template_kwargs": {"chat_template": "x"}}, "own template"),
        (TURNS, {"chat_template_kwargs": {"tokenize": True}}, "asks the template to tokenise"),
        (TURNS, {"continue_final_message": True}, "exclude each other"),
        (TURNS, {"messages": []}, "needs a message"),
        ("{{ raise_exception('roles must alternate') }}", {}, "roles must alternate"),
        ("{{ messages[7].role.x }}", {}, "refused"),
        ("", {"continue_final_message": True, "add_generation_prompt": False}, "drops the final message"),
    ],
)
def test_what_cannot_be_known_says_why(source, fields, reason):
    """A chat that the engine refuses, or renders in a way that is not known, is never rendered as something else."""
    with pytest.raises(CannotRender, match=reason):
        render(source, **{"messages": user("x"), **fields})


def test_a_model_without_a_default_template_renders_nothing():
    """Named templates alone do not answer a chat without tools."""
    with pytest.raises(CannotRender, match="no chat template"):
        Renderer({"rag": "x"}, {}).render(ChatPrompt(messages=user("x")))
