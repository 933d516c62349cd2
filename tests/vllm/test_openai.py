"""kvroute before real engines, spoken to by the official client."""

from __future__ import annotations

import json
from collections.abc import Iterator

import openai
import pytest

CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Bern", "Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells a city's weather.", "parameters": CITY, "strict": True},
}
QUESTION = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is the weather in Bern?"}]


@pytest.fixture
def client(router) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{router.url}/v1", api_key="any", max_retries=0, timeout=60) as client:
        yield client


def test_models_are_listed_once(client):
    """Two replicas with one model are one model to the client."""
    assert [model.id for model in client.models.list()] == ["tiny"]


def test_a_chat_is_answered(client):
    """A chat returns one answer, with the usage that the engine counted."""
    answer = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8)
    assert (len(answer.choices), answer.usage.completion_tokens) == (1, 8)


def test_a_stream_gives_the_same_answer_in_pieces(client):
    """A streamed chat carries the text of the plain one, and no usage that was not asked for."""
    whole = client.chat.completions.create(model="tiny", messages=QUESTION, max_tokens=8, temperature=0)
    with client.chat.completions.create(
        model="tiny", messages=QUESTION, max_tokens=8, temperature=0, stream=True
    ) as stream:
        chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    usages = [chunk.usage for chunk in chunks if chunk.usage]
    assert (text, usages) == (whole.choices[0].message.content, [])


def test_a_named_tool_is_called(client):
    """A named tool comes back as a call of that tool with arguments of its schema."""
    choice = {"type": "function", "function": {"name": "weather"}}
    for seed in range(8):  # random weights may fill an answer with the spaces that JSON allows; then it is no call
        answer = client.chat.completions.create(
            model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice=choice, max_tokens=200, seed=seed
        )
        if answer.choices[0].message.tool_calls:
            break
    call = answer.choices[0].message.tool_calls[0]
    assert (call.function.name, list(json.loads(call.function.arguments))) == ("weather", ["city"])


def test_an_offered_tool_may_be_ignored(client):
    """With tool_choice auto the engine decides, and either a text or a call comes back."""
    answer = client.chat.completions.create(
        model="tiny", messages=QUESTION, tools=[WEATHER], tool_choice="auto", max_tokens=16
    )
    message = answer.choices[0].message
    assert bool(message.content) != bool(message.tool_calls)


def test_a_tool_result_is_accepted(client):
    """A conversation goes on after a tool call and its result."""
    call = {"id": "call1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}}
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call1", "content": "rain"},
    ]
    answer = client.chat.completions.create(model="tiny", messages=turns, tools=[WEATHER], max_tokens=8)
    assert answer.choices[0].finish_reason in {"length", "stop"}


def test_an_unknown_model_is_the_clients_fault(client):
    """The client's own exception for 404 is raised, as with one engine."""
    with pytest.raises(openai.NotFoundError, match="nobody"):
        client.chat.completions.create(model="nobody", messages=QUESTION)


def test_completions_take_text_and_tokens(client):
    """A completion from token ids works as one from text does."""
    by_text = client.completions.create(model="tiny", prompt="def main():", max_tokens=4)
    by_ids = client.completions.create(model="tiny", prompt=[300, 301, 302], max_tokens=4)
    assert (by_text.usage.completion_tokens, by_ids.usage.prompt_tokens) == (4, 3)
