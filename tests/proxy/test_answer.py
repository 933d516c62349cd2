"""Counts and texts of answers that are over; on answers recorded from vLLM."""

from __future__ import annotations

import json

import pytest

from kvroute.proxy.answer import REASON_CHARS_MAX, read_body, reason, text_of_events, usage_in_event, was_aborted
from kvroute.proxy.sse import events_of
from kvroute.routing.demand import Usage
from tests.fake.wire import recorded

ABORTED = b'{"choices":[{"index":0,"message":{"content":"half"},"finish_reason":"abort"}]}'


def body_of(name: str) -> bytes:
    return recorded(name).answer.body.encode()


def test_usage_of_a_stream():
    """The last event with usage gives the counts, cached tokens included."""
    event = list(events_of(body_of("chat_stream_usage")))[-2]
    assert usage_in_event(event) == Usage(336, 8, 320)


def test_no_usage():
    """Without usage there are no counts, and without details no cached tokens."""
    assert usage_in_event(b"") is None
    assert usage_in_event(b'data: {"usage":{"prompt_tokens":3,"completion_tokens":2}}\n\n') == Usage(3, 2, None)


@pytest.mark.parametrize(("told", "taken"), [((-3, -2, -1), (0, 0, 0)), ((3, 2, 99), (3, 2, 3))])
def test_counts_without_sense(told, taken):
    """No count is below nothing, and no more of a prompt is cached than there is."""
    prompt, completion, cached = told
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    assert read_body(json.dumps({"choices": [], "usage": usage}).encode())[0] == Usage(*taken)


@pytest.mark.parametrize("name", ["chat_stream", "chat_stream_usage"])
def test_text_of_a_stream(name: str):
    """The pieces of a stream make the whole text."""
    events = [json.loads(event[6:]) for event in events_of(body_of(name)) if b"[DONE]" not in event]
    text = "".join(choice["delta"]["content"] for event in events for choice in event["choices"])
    assert text_of_events(body_of(name)) == text


@pytest.mark.parametrize("field", ["tool_calls", "reasoning", "reasoning_content", "function_call"])
def test_text_that_is_not_all(field: str):
    """Where something else than text was generated, the text is not what the cache holds."""
    assert text_of_events(b'data: {"choices":[{"delta":{"content":"a","%b":["x"]}}]}\n\n' % field.encode()) is None
    assert read_body(b'{"choices":[{"message":{"content":"a","%b":["x"]}}]}' % field.encode()) == (None, None)


def test_events_that_cannot_be_read():
    """Events of another shape have no text."""
    assert text_of_events(b"data: {oops}\n\n") is None
    assert text_of_events(b"") == ""


def test_answer_in_one_piece():
    """Counts and text of an answer that was not streamed."""
    usage, text = read_body(body_of("chat_first"))
    assert (usage, text) == (Usage(336, 8, 0), "light\nlight\nlight\nlight\n")


def test_several_choices_have_no_one_text():
    """Of several answers none is taken for the one that the next turn continues."""
    assert read_body(body_of("completion_list_of_prompts"))[1] is None


def test_aborts():
    """An answer that the engine ended is told from one that talks about aborting."""
    assert was_aborted(ABORTED)
    assert not was_aborted(ABORTED.replace(b'"abort"', b'"stop"').replace(b"half", b'\\"abort\\"'))
    assert not was_aborted(body_of("chat_first"))
    assert not was_aborted(b'"abort"')


def test_reason():
    """The message of an error is found and bounded; other bodies have none."""
    assert reason(body_of("err_wrong_model")) == "The model `nope` does not exist. Valid aliases: tiny."
    assert len(reason(b'{"error":{"message":"%b"}}' % (b"x" * 9999))) == REASON_CHARS_MAX
    assert reason(b'{"error":"Unauthorized"}') == reason(b"<html>") == ""
