"""What a template is given of a client's messages."""

from __future__ import annotations

import copy

import pytest

from kvroute.adapters.conversation import (
    CannotRender,
    conversation_of,
    has_media,
    modality_of,
    tools_of,
    without_developer,
)

IMAGE = {"type": "image_url", "image_url": {"url": "data:"}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 1, "a": 2}'}}


def text(value):
    return {"type": "text", "text": value}


def one(message, *, as_parts=False, mark=None):
    return conversation_of([message], as_parts=as_parts, mark=mark)[0]


@pytest.mark.parametrize(
    ("content", "joined", "parts"),
    [
        ("hi", "hi", [text("hi")]),
        (None, "", []),
        ([], "", []),
        ([text("a"), text(""), "b"], "a\nb", [text("a"), text(""), text("b")]),
        ([{"type": "refusal", "refusal": "no"}, {"type": "text", "text": None}], "no", [text("no")]),
        ([{"type": "thinking", "thinking": "hm"}], "hm", [text("hm")]),
        ([{"type": "input_text", "text": "in", "uuid2": 1}], "in", [text("in") | {"uuid2": 1}]),
    ],
)
def test_content_takes_the_form_that_the_template_wants(content, joined, parts):
    """Templates get one string, joined by line breaks without empty parts, or the list of parts."""
    message = {"role": "user", "content": content}
    assert (one(message)["content"], one(message, as_parts=True)["content"]) == (joined, parts)


def test_tool_results_are_one_string_in_both_forms():
    """Templates read a tool's answer as a string, unless it refers to tools."""
    reference = {"type": "tool_reference", "name": "t"}
    message = {"role": "tool", "tool_call_id": "1", "content": [text("x"), text("y")]}
    assert one(message, as_parts=True) == {"role": "tool", "content": "x\ny", "tool_call_id": "1"}
    assert one({**message, "content": [reference]}, as_parts=True)["content"] == [reference]


def test_a_mark_stands_where_media_begin():
    """With parts the mark replaces the item; in a string it comes before all text, as placeholders do."""
    message = {"role": "user", "content": [text("what is"), IMAGE, text("?")]}
    assert one(message, as_parts=True, mark="M")["content"] == [text("what is"), text("M"), text("?")]
    assert one(message, as_parts=True)["content"] == [text("what is"), {"type": "image"}, text("?")]
    assert one(message, mark="M")["content"].startswith("M\nwhat is")


@pytest.mark.parametrize(
    ("part", "modality"),
    [
        (IMAGE, "image"),
        ({"image_url": "u"}, "image"),
        ({"type": "input_audio"}, "audio"),
        ({"type": "video_url"}, "video"),
        (text("x"), None),
        ("x", None),
        ({"type": "text", "text": "x", "image_url": "u"}, None),
    ],
)
def test_media_are_recognised(part, modality):
    """A part is media by its type, or without one by the field that it has."""
    assert modality_of(part) == modality
    assert has_media([{"role": "user", "content": [part]}]) == (modality is not None)


@pytest.mark.parametrize(
    ("arguments", "parsed"),
    [('{"b": 1, "a": 2}', {"b": 1, "a": 2}), ("{broken", {}), ("[1]", {}), ("", {}), (None, {}), ({"x": 1}, {"x": 1})],
)
def test_arguments_of_tool_calls_become_objects(arguments, parsed):
    """Templates get objects, their keys in the order given; what is no object becomes an empty one."""
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    message = one({"role": "assistant", "content": None, "tool_calls": [call]})
    function = message["tool_calls"][0]["function"]
    assert list(function["arguments"].items()) == list(parsed.items())
    assert (list(function), message["content"]) == (["arguments", "name"], "")


def test_fields_that_the_engine_reads_are_kept_and_others_dropped():
    """Name and task are for every role, reasoning under both its names, no empty tool_calls, nothing unknown."""
    message = {"role": "assistant", "content": "c", "reasoning_content": "why", "tool_calls": [], "name": "n", "foo": 1}
    assert one(message) == {
        "role": "assistant",
        "content": "c",
        "reasoning": "why",
        "reasoning_content": "why",
        "name": "n",
    }
    assert one({"role": "developer", "content": "d"})["tools"] is None


def test_the_billing_header_is_dropped_from_system_messages_only():
    """A first line that changes with every request is not part of the prompt."""
    line = "x-anthropic-billing-header: cch=1"
    assert one({"role": "system", "content": f"{line}\nrest"})["content"] == "rest"
    assert one({"role": "system", "content": line}, as_parts=True)["content"] == []
    assert one({"role": "user", "content": line})["content"] == line


def test_developer_messages_become_one_system_message():
    """For templates without that role all system and developer texts are merged at the front."""
    roles = [("developer", "a"), ("user", "u"), ("system", [text("b"), text("c")])]
    messages = conversation_of([{"role": role, "content": content} for role, content in roles], as_parts=False)
    merged = without_developer(messages)
    assert [(m["role"], m["content"]) for m in merged] == [("system", "a\n\nb\nc"), ("user", "u")]
    assert without_developer(messages[:2]) == [{"role": "system", "content": "a"}, messages[1]]


def test_tools_get_the_fields_of_the_engines_schema():
    """Known fields in the schema's order, defaults filled in, unknown ones dropped."""
    tool = {"cache": 1, "function": {"strict": True, "parameters": {"z": 1}, "name": "n", "extra": 5}}
    function = {"name": "n", "description": None, "parameters": {"z": 1}, "strict": True}
    [kept] = tools_of([tool]) or []
    assert kept == {"type": "function", "function": function}
    assert list(kept["function"]) == list(function)
    assert tools_of(None) is None


@pytest.mark.parametrize(
    "message",
    [
        {"content": "no role"},
        "no message",
        {"role": "user", "content": [{"type": "zzz"}]},
        {"role": "user", "content": 5},
        {"role": "assistant", "tool_calls": [{"type": "custom"}]},
    ],
)
def test_what_the_engine_refuses_cannot_be_rendered(message):
    """Messages of no known shape raise instead of becoming some other prompt."""
    with pytest.raises(CannotRender):
        one(message)


def test_the_clients_messages_are_never_changed():
    """The body that is forwarded stays as it came."""
    messages = [
        {"role": "developer", "content": [text("d"), IMAGE], "tools": []},
        {"role": "assistant", "tool_calls": [CALL], "reasoning": "r"},
    ]
    before = copy.deepcopy(messages)
    for as_parts in (True, False):
        without_developer(conversation_of(messages, as_parts=as_parts, mark="M"))
    assert messages == before
