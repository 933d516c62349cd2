"""Bodies on the wire. Their shapes are compared with recorded ones in test_handlers; here is what they say."""

from __future__ import annotations

import json

from kvroute.errors import BadRequest
from kvroute.fake.openai import Choice, Count, Reply, delta_chunk, error, event, models, usage_chunk, whole

CHAT = Reply("chatcmpl-1", 7, "sim", True)
TEXT = Reply("cmpl-1", 7, "sim", False)


def test_an_event_is_one_compact_line():
    """Events are `data:`, compact JSON, and an empty line."""
    assert event({"a": [1, "é"]}) == 'data: {"a":[1,"é"]}\n\n'.encode()


def test_a_chunk_carries_its_text_in_the_place_of_its_kind():
    """Chats have a delta, completions a text."""
    choice = Choice(0, "hi")
    assert delta_chunk(CHAT, choice, None, is_signed=False)["choices"][0]["delta"] == {"content": "hi"}
    assert delta_chunk(TEXT, choice, None, is_signed=False)["choices"][0]["text"] == "hi"


def test_usage_adds_up():
    """Total is prompt and completion; the details tell hits."""
    usage = usage_chunk(CHAT, Count(10, 5, 8, None))["usage"]
    assert usage == {
        "prompt_tokens": 10,
        "total_tokens": 15,
        "completion_tokens": 5,
        "prompt_tokens_details": {"cached_tokens": 8},
    }


def test_a_whole_answer_holds_every_choice():
    """Choices come in order with their reasons."""
    body = whole(
        TEXT, [Choice(0, "a", finish_reason="stop"), Choice(1, "b", finish_reason="length")], Count(1, 2, 0, 0)
    )
    assert [(choice["text"], choice["finish_reason"]) for choice in body["choices"]] == [("a", "stop"), ("b", "length")]


def test_an_error_tells_what_it_was_told():
    """Message, type, param and code come from the exception."""
    failure = BadRequest("no", param="n", status=404, kind="NotFoundError")
    assert json.loads(json.dumps(error(failure))) == {
        "error": {"message": "no", "type": "NotFoundError", "param": "n", "code": 404}
    }


def test_the_model_list_has_the_one_model():
    """The card tells name and context length."""
    card = models("sim", 4096, 7)["data"][0]
    assert (card["id"], card["max_model_len"], card["parent"]) == ("sim", 4096, None)
