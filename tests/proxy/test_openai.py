"""What is read from request bodies, and the bodies that the router writes."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import BadRequest, NoReplica
from kvroute.kv.chain import tokens_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt, TokenPrompt, WrittenChat
from kvroute.proxy.openai import PROMPTS_MAX, ROUTES, Inference, error_body, models_body, parse, unknown_model
from kvroute.routing.replica import ModelCard

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "Hi"}]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 9) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


def read(path: str, **fields: object) -> Inference:
    return parse(path, json.dumps(fields).encode())


def test_chat():
    """Everything that changes a chat's tokens is read."""
    found = read(
        CHAT,
        model="m",
        messages=MESSAGES,
        tools=[{"type": "function"}],
        documents=[{"text": "x"}],
        chat_template="{{ x }}",
        chat_template_kwargs={"thinking": True},
        add_generation_prompt=False,
        continue_final_message=True,
        add_special_tokens=True,
        reasoning_effort="high",
    )
    prompt = ChatPrompt(
        MESSAGES, [{"type": "function"}], [{"text": "x"}], "{{ x }}", {"thinking": True}, False, True, True, "high"
    )
    [source] = found.sources
    assert isinstance(source, WrittenChat)
    assert (found.model, source.decoded(), found.kind) == ("m", prompt, "chat")


@pytest.mark.parametrize(
    ("prompt", "sources"),
    [
        ("Hi", (TextPrompt("Hi"),)),
        (["a", "b"], (TextPrompt("a"), TextPrompt("b"))),
        ([1, 2], (TokenPrompt(tokens_of([1, 2])),)),
        ([[1], [2, 3]], (TokenPrompt(tokens_of([1])), TokenPrompt(tokens_of([2, 3])))),
        ([], ()),
        (None, ()),
        ([1, "a"], ()),
        (["a", 1], ()),
        ([[1], "a"], ()),
        ([-1], ()),
        ([1 << 32], ()),
        ({"a": 1}, ()),
        (["a"] * (PROMPTS_MAX + 1), ()),
    ],
)
def test_completion_prompts(prompt: object, sources: tuple[object, ...]):
    """All four forms of a completion's prompt are read; anything else is left to the engine."""
    assert read(COMPLETION, prompt=prompt).sources == sources


def test_special_tokens_of_completions():
    """Completions add special tokens unless told otherwise."""
    assert read(COMPLETION, prompt="a", add_special_tokens=False).sources == (TextPrompt("a", False),)


@pytest.mark.parametrize(
    ("path", "fields", "bound"),
    [
        (CHAT, {}, None),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 7}, 7),
        (CHAT, {"max_tokens": "5"}, None),
        (COMPLETION, {}, 16),
        (COMPLETION, {"max_tokens": None}, None),
        (COMPLETION, {"max_tokens": 0}, None),
        (COMPLETION, {"max_tokens": 9, "max_completion_tokens": 7}, 9),
    ],
)
def test_bound_of_the_answer(path: str, fields: dict[str, object], bound: int | None):
    """The client's bound follows vLLM's defaults."""
    assert read(path, **fields).max_tokens == bound


@pytest.mark.parametrize(
    ("path", "fields", "reads"),
    [
        (CHAT, {}, True),
        (CHAT, {"logprobs": True, "top_logprobs": 2}, True),
        (CHAT, {"prompt_logprobs": 1}, False),
        (CHAT, {"echo": True}, False),
        (COMPLETION, {"echo": True}, True),
        (COMPLETION, {"echo": True, "logprobs": 1}, False),
        (COMPLETION, {"logprobs": 1}, True),
    ],
)
def test_requests_that_skip_the_cache(path: str, fields: dict[str, object], reads: bool):
    """Where prompt logprobs are wanted the engine reads nothing from its cache, so nothing may be predicted."""
    assert read(path, prompt="x", messages=MESSAGES, **fields).reads_cache is reads


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate_prompt_tokens": 5},
        {"cache_salt": ""},
        {"cache_salt": 5},
        {"kv_transfer_params": {"prompt_token_ids": [1]}},
        {"prompt_embeds": "x"},
        {"suffix": "x"},
    ],
)
def test_prompts_that_something_else_decides(fields: dict[str, object]):
    """Where the tokens are not those of the prompt, there is no prompt to route by."""
    assert read(COMPLETION, prompt="a", **fields).sources == ()


@pytest.mark.parametrize("messages", [None, [], "Hi", {"role": "user"}], ids=lambda value: json.dumps(value))
def test_messages_that_the_engine_refuses(messages: object):
    """A shape that the engine refuses is forwarded, without a prompt and with a guess of its size."""
    found = read(CHAT, model="m", messages=messages, padding="x" * 400)
    assert (found.sources, found.model) == ((), "m")
    assert found.guessed_tokens > 100


@pytest.mark.parametrize("body", [b"[1, 2]", b'"x"', b"5", b"null"])
def test_no_object(body: bytes):
    """JSON that is no object is the engine's to refuse."""
    assert parse(CHAT, body) == Inference(kind="chat", guessed_tokens=len(body) // 4)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"", "empty"),
        (b'{"model": "m", "messages": [', "truncated"),
        (b"{'model': 1}", "malformed"),
        (b"\xff\xfe\xff", "malformed"),
        (b'{"messages": ' + b"[" * 200_000, "deep"),
    ],
    ids=["empty", "truncated", "quotes", "no text", "deep"],
)
def test_no_json(body: bytes, what: str):
    """A body that is no JSON is refused with a message that says what is wrong."""
    with pytest.raises(BadRequest, match=rf"(?i)not valid JSON: .*{what}|recursion|nested") as caught:
        parse(CHAT, body)
    assert (caught.value.status, caught.value.param) == (400, "body")


@pytest.mark.parametrize(
    "body",
    [b'{"model": "m", "temperature": NaN}', b'{"model": "\\ud800"}', '{"model": "m"}'.encode("utf-16")],
    ids=["NaN", "lone surrogate", "UTF-16"],
)
def test_json_that_only_python_reads(body: bytes):
    """What the engine's decoder can read is not refused, though nothing is read from it."""
    assert parse(CHAT, body).sources == ()


@given(st.dictionaries(st.sampled_from(["model", "messages", "prompt", "n", "stream", "tools"]) | st.text(), VALUES))
def test_any_object_is_read(fields: dict[str, object]):
    """No object is refused, whatever its fields hold."""
    body = json.dumps(fields).encode()
    for path, kind in ROUTES.items():
        assert parse(path, body).kind == kind


def test_other_routes_tell_their_model():
    """Of routes whose prompts are not understood the model is read."""
    assert read("/v1/embeddings", model="m", input="x").model == "m"


@pytest.mark.parametrize("order", [0, 1])
def test_forms_tell_their_model(order: int):
    """An audio form's model is read, before or after the file."""
    model = b'Content-Disposition: form-data; name="model"\r\n\r\nwhisper\r\n'
    file = (
        b'Content-Disposition: form-data; name="file"; filename="a"\r\nContent-Type: audio/wav\r\n\r\n\x00\r\n\xff\r\n'
    )
    parts = [model, file] if order else [file, model]
    body = b"".join(b"--b.1\r\n" + part for part in parts) + b"--b.1--\r\n"
    found = parse("/v1/audio/transcriptions", body, 'multipart/form-data; boundary="b.1"')
    assert (found.model, found.kind) == ("whisper", "form")


def test_form_without_a_boundary():
    """A form that cannot be taken apart names no model."""
    assert parse("/v1/audio/transcriptions", b"x", "multipart/form-data").model is None


def test_sequences():
    """An engine generates n answers for each prompt."""
    assert read(COMPLETION, prompt=["a", "b"], n=3).sequences == 6


def test_error_body():
    """Errors have OpenAI's shape."""
    assert json.loads(error_body(NoReplica("all gone", param="model"))) == {
        "error": {"message": "all gone", "type": "ServiceUnavailableError", "param": "model", "code": 503}
    }


def test_unknown_model():
    """An unknown model is refused in vLLM's words."""
    assert unknown_model("nope", ["tiny", "b"]).message == "The model `nope` does not exist. Valid aliases: b, tiny."


def test_models_body():
    """Every model is listed once, with its context length."""
    cards = [ModelCard("a", 100, "/a"), ModelCard("a", 100, "/a"), ModelCard("l", None, "/l", "a")]
    listed = json.loads(models_body(cards, 7))
    assert [(card["id"], card["max_model_len"], card["parent"], card["created"]) for card in listed["data"]] == [
        ("a", 100, None, 7),
        ("l", None, "a", 7),
    ]
