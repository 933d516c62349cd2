"""Request bodies: what is read from them and what is refused. Recorded errors are compared in test_handlers."""

from __future__ import annotations

import pytest

from kvroute.errors import BadRequest
from kvroute.fake import text
from kvroute.fake.requests import Model, body_of, chat, completion, tokens_to_show
from kvroute.kv.chain import tokens_of

MODEL = Model("sim", 100)
TALK = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [text.encode("ab")]),
        (["ab", "cd"], [text.encode("ab"), text.encode("cd")]),
        ([1, 2], [tokens_of([1, 2])]),
        ([[1, 2], [3]], [tokens_of([1, 2]), tokens_of([3])]),
    ],
)
def test_a_prompt_is_text_or_ids_or_several_of_either(prompt, expected):
    """All four forms of a completion prompt are read."""
    assert completion({"prompt": prompt}, MODEL).prompts == expected


def test_bounds_of_an_answer():
    """A chat has no bound unless told, by either name, the newer first; a completion has vLLM's 16."""
    assert chat(TALK, MODEL).max_tokens is None
    assert chat(TALK | {"max_tokens": 3}, MODEL).max_tokens == 3
    assert chat(TALK | {"max_tokens": 3, "max_completion_tokens": 4}, MODEL).max_tokens == 4
    assert completion({"prompt": "a"}, MODEL).max_tokens == 16


def test_usage_is_continuous_only_where_usage_is_asked_for():
    """continuous_usage_stats alone does nothing."""
    for options, expected in (
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
        ({"continuous_usage_stats": True}, (False, False)),
    ):
        ask = chat(TALK | {"stream": True, "stream_options": options}, MODEL)
        assert (ask.include_usage, ask.continuous_usage) == expected


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"prompt": []}, "at least one token"),
        ({"prompt": [2**32]}, "Token id 4294967296 is out of vocabulary"),
        ({"prompt": [-1]}, "Token id -1 is out of vocabulary"),
        ({"prompt": [1, "a"]}, "valid list of integers"),
        ({"prompt": [5] * 102}, "maximum context length is 100 tokens. However, your prompt contains 102 input tokens"),
        ({"prompt": [5] * 101}, "your prompt contains at least 101 input tokens"),
        ({"prompt": "abcd" * 900}, "contains at least 101 input tokens, which exceeds this limit even without any"),
        ({"prompt": ["a", "abcd" * 900]}, "(parameter=input_tokens, value=101)"),
        ({"prompt": [5] * 100}, "max_tokens must be at least 1, got 0"),
        ({"prompt": "a", "n": 0}, "n must be between 1 and 1024"),
        ({"prompt": "a", "max_tokens": "3"}, "valid integer"),
        ({"prompt": "a", "cache_salt": ""}, "non-empty string"),
        ({"model": "sim"}, "body.prompt"),
    ],
)
def test_what_cannot_be_served_is_refused(fields, words):
    """The error says which field is wrong and why."""
    with pytest.raises(BadRequest) as refused:
        completion(fields, MODEL)
    assert words in refused.value.message


@pytest.mark.parametrize("messages", ["Hi", ["Hi"]])
def test_messages_are_a_list_of_objects(messages):
    """Anything else is a schema error."""
    with pytest.raises(BadRequest, match="valid list of messages"):
        chat({"messages": messages}, MODEL)


def test_json_is_read_as_python_reads_it():
    """NaN and lone surrogates, which stricter readers refuse, are served as vLLM serves them."""
    body = body_of("application/json", b'{"prompt": "\\ud800", "temperature": NaN}')
    assert text.decode(tokens_to_show(body)) == "\ud800"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("presence_penalty", 2.5, "presence_penalty must be in [-2, 2], got 2.5."),
        ("frequency_penalty", -3, "frequency_penalty must be in [-2, 2], got -3.0."),
        ("repetition_penalty", 0, "repetition_penalty must be greater than zero, got 0.0."),
        ("repetition_penalty", float("nan"), "repetition_penalty must be a finite number, got nan."),
        (
            "temperature",
            float("inf"),
            "temperature must be a finite number, got inf. (parameter=temperature, value=inf)",
        ),
        ("temperature", 2.5, "temperature must be in [0, 2], got 2.5. (parameter=temperature, value=2.5)"),
        ("top_p", 0, "top_p must be in (0, 1], got 0.0. (parameter=top_p, value=0.0)"),
        ("top_k", -2, "top_k must be 0 (disable), or at least 1, got -2."),
        ("min_p", 1.5, "min_p must be in [0, 1], got 1.5."),
        ("stop", ["a", ""], "stop cannot contain an empty string."),
        ("stop", "", "stop cannot contain an empty string."),
        ("min_tokens", -1, "min_tokens must be greater than or equal to 0, got -1."),
        ("min_tokens", 17, "min_tokens must be less than or equal to max_tokens=16, got 17."),
    ],
)
def test_sampling_that_vllm_refuses_is_refused_in_its_words(field, value, words):
    """As `SamplingParams._verify_args` of vLLM 0.32 has it."""
    with pytest.raises(BadRequest) as raised:
        completion({"prompt": "Hi", field: value}, MODEL)
    assert raised.value.message == words


@pytest.mark.parametrize(
    "fields",
    [
        {"presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1.3, "temperature": 2, "top_p": 1},
        {"top_k": -1, "min_p": 1, "stop": ["a"], "min_tokens": 16, "temperature": None, "top_p": None},
    ],
)
def test_sampling_at_the_bounds_is_served(fields):
    """So is what is null."""
    assert completion({"prompt": "Hi", **fields}, MODEL).n == 1


def test_what_cannot_be_decoded_is_the_clients_mistake():
    """Also where the decoder itself gives up, for a body nested too deeply."""
    for raw, words in ((b"{", "JSON decode error"), (b"[" * 100_000, "There was an error parsing the body")):
        with pytest.raises(BadRequest, match=words) as caught:
            body_of("application/json", raw)
        assert caught.value.status == 400
