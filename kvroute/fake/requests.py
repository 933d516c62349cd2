"""Request bodies read and checked as vLLM does: which errors, in which order, in whose words."""

from __future__ import annotations

import json
from math import isfinite
from typing import Any

import orjson
from msgspec import Struct

from kvroute.errors import BadRequest
from kvroute.fake import text
from kvroute.kv.chain import TOKEN_BYTES, TokenBytes, tokens_of

DEFAULT_COMPLETION_TOKENS = 16
CHOICES_LIMIT = 1024  # prompts x n of one request
_SOURCES = ("prompt", "messages")  # of a tokenise request


class Model(Struct, frozen=True):
    """What requests are checked against."""

    name: str
    max_model_len: int  # tokens, prompt and answer together


class Ask(Struct, frozen=True, kw_only=True):
    """A request for text, checked."""

    is_chat: bool
    prompts: list[TokenBytes]
    n: int
    max_tokens: int | None  # the client's bound for each answer; None = what the context leaves
    min_tokens: int
    is_endless: bool  # ignore_eos: the answer goes on to max_tokens
    cache_salt: str | None
    session: str | None  # named in events; nothing else follows from it
    reports_hits: bool  # events tell again which blocks were found in the cache
    is_stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool

    @property
    def prompt_tokens(self) -> int:
        """Tokens of all prompts together."""
        return sum(map(len, self.prompts)) // TOKEN_BYTES


def invalid(kind: str, loc: str, message: str, value: Any, **context: str) -> BadRequest:
    """Make the error of a body that does not have the right shape."""
    return BadRequest(
        f"1 validation error:\n  {_detail(kind, loc, message, value, **context)}", param=loc, kind="Bad Request"
    )


def _detail(kind: str, loc: str, message: str, value: Any, **context: str) -> dict[str, Any]:
    shown = f"<{type(value).__name__} of {len(value)} items>" if isinstance(value, dict | list) else str(value)
    detail: dict[str, Any] = {"type": kind, "loc": loc, "msg": message, "input": shown}
    return detail | {"ctx": context} if context else detail


def refused(message: str, parameter: str, value: Any = None) -> BadRequest:
    """Make the error of a field whose value will not do."""
    shown = "" if value is None else f", value={value}"
    return BadRequest(f"{message} (parameter={parameter}{shown})", param=parameter)


def body_of(content_type: str, raw: bytes) -> dict[str, Any]:
    """Decode a JSON object."""
    if content_type != "application/json":
        message = "1 validation error:\n  Unsupported Media Type: Only 'application/json' is allowed"
        raise BadRequest(message, kind="Bad Request")
    if not raw:
        raise invalid("missing", "body", "Field required", None)
    try:
        body = _decoded(raw)
    except json.JSONDecodeError as problem:
        raise invalid("json_invalid", f"body.{problem.pos}", "JSON decode error", {}, error=problem.msg) from None
    except RecursionError:
        raise BadRequest("There was an error parsing the body", kind="Bad Request") from None
    if not isinstance(body, dict):
        message = "Input should be a valid dictionary or object to extract fields from"
        raise invalid("model_attributes_type", "body", message, body)
    return body


def _decoded(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        # Python's own decoder is what vLLM uses: it takes NaN and lone surrogates, and words errors differently
        return json.loads(raw.decode("utf-8", "replace"))


def check_model(body: dict[str, Any], model: Model) -> None:
    """Refuse a model that is not served. A body without one is served."""
    name = body.get("model")
    if name is not None and name != model.name:
        raise BadRequest(
            f"The model `{name}` does not exist. Valid aliases: {model.name}.",
            param="model",
            status=404,
            kind="NotFoundError",
        )


def chat(body: dict[str, Any], model: Model) -> Ask:
    """Read a chat completion request."""
    messages = _messages(body)
    check_model(body, model)
    tokens = [_rendered(body, messages)]
    bound = _integer(body, "max_completion_tokens")
    bound = _integer(body, "max_tokens") if bound is None else bound
    return _ask(body, model, tokens, is_chat=True, max_tokens=bound)


def completion(body: dict[str, Any], model: Model) -> Ask:
    """Read a completion request."""
    check_model(body, model)
    bound = _integer(body, "max_tokens")
    bound = DEFAULT_COMPLETION_TOKENS if bound is None else bound
    return _ask(body, model, _prompts(body), is_chat=False, max_tokens=bound)


def _messages(body: dict[str, Any]) -> list[dict[str, Any]]:
    messages = body.get("messages")
    if messages is None:
        raise invalid("missing", "body.messages", "Field required", body)
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise invalid("list_type", "body.messages", "Input should be a valid list of messages", messages)
    return messages


def _rendered(body: dict[str, Any], messages: list[dict[str, Any]]) -> TokenBytes:
    if not messages:
        raise BadRequest("Cannot apply chat template to an empty conversation. Provide at least one message.")
    return text.encode(
        text.render(
            messages,
            tools=body.get("tools"),
            documents=body.get("documents"),
            add_generation_prompt=body.get("add_generation_prompt", True),
            continue_final_message=body.get("continue_final_message", False),
        )
    )


def tokens_to_show(body: dict[str, Any]) -> TokenBytes:
    """Tokenise what a tokenise request holds: a conversation or a text."""
    if "messages" in body:
        return _rendered(body, _messages(body))
    prompt = body.get("prompt")
    if isinstance(prompt, str):
        return text.encode(prompt)
    missing = [f"\n  {_detail('missing', f'body.{name}', 'Field required', body)}" for name in _SOURCES]
    raise BadRequest("2 validation errors:" + "".join(missing), param="body.prompt", kind="Bad Request")


def token_ids(values: Any, name: str) -> TokenBytes:
    """Pack a JSON list of token ids."""
    if not isinstance(values, list) or not all(type(value) is int for value in values):
        raise invalid("list_type", f"body.{name}", "Input should be a valid list of integers", values)
    outside = next((value for value in values if not 0 <= value < text.VOCABULARY), None)
    if outside is not None:
        raise BadRequest(f"Token id {outside} is out of vocabulary")
    return tokens_of(values)


def _prompts(body: dict[str, Any]) -> list[TokenBytes]:
    prompt = body.get("prompt")
    if prompt is None:
        raise invalid("missing", "body.prompt", "Field required", body)
    several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], str | list)
    return [_one_prompt(item) for item in (prompt if several else [prompt])]


def _one_prompt(prompt: Any) -> TokenBytes:
    tokens = text.encode(prompt) if isinstance(prompt, str) else token_ids(prompt, "prompt")
    if not tokens:
        raise BadRequest("You must provide at least one token as prompt.", param="prompt")
    return tokens


def _ask(
    body: dict[str, Any], model: Model, prompts: list[TokenBytes], *, is_chat: bool, max_tokens: int | None
) -> Ask:
    is_stream = bool(body.get("stream"))
    options = body.get("stream_options")
    if options is not None and not is_stream:
        raise refused("Stream options can only be defined when `stream=True`.", "stream_options")
    options = options if isinstance(options, dict) else {}
    n = _integer(body, "n")
    ask = Ask(
        is_chat=is_chat,
        prompts=prompts,
        n=1 if n is None else n,
        max_tokens=max_tokens,
        min_tokens=_integer(body, "min_tokens") or 0,
        is_endless=bool(body.get("ignore_eos")),
        cache_salt=_salt(body),
        session=body["session_id"] if isinstance(body.get("session_id"), str) else None,
        reports_hits=_option(body, "vllm_xargs", "kv_cache_report_mode") == "full",
        is_stream=is_stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage")) and bool(options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
    )
    _check_sampling(body)
    _check_sizes(ask, model, is_text=is_chat or _is_text(body.get("prompt")))
    return ask


def _check_sampling(body: dict[str, Any]) -> None:
    """Refuse what `SamplingParams._verify_args` does, in its order; not all of its messages name the field."""
    for name in ("presence_penalty", "frequency_penalty"):
        if not -2 <= (value := _number(body, name, 0.0)) <= 2:
            raise BadRequest(f"{name} must be in [-2, 2], got {value}.")
    penalty = _number(body, "repetition_penalty", 1.0)
    if not isfinite(penalty):
        raise BadRequest(f"repetition_penalty must be a finite number, got {penalty}.")
    if penalty <= 0:
        raise BadRequest(f"repetition_penalty must be greater than zero, got {penalty}.")
    temperature = _number(body, "temperature", 1.0)
    if not isfinite(temperature):
        raise refused(f"temperature must be a finite number, got {temperature}.", "temperature", temperature)
    if temperature < 0:
        raise refused(f"temperature must be non-negative, got {temperature}.", "temperature", temperature)
    if temperature > 2:
        raise refused(f"temperature must be in [0, 2], got {temperature}.", "temperature", temperature)
    top_p, min_p = _number(body, "top_p", 1.0), _number(body, "min_p", 0.0)
    if not 0 < top_p <= 1:
        raise refused(f"top_p must be in (0, 1], got {top_p}.", "top_p", top_p)
    top_k = _integer(body, "top_k")
    if top_k is not None and top_k < -1:
        raise BadRequest(f"top_k must be 0 (disable), or at least 1, got {top_k}.")
    if not 0 <= min_p <= 1:
        raise BadRequest(f"min_p must be in [0, 1], got {min_p}.")
    stops = body.get("stop")
    if "" in (stops if isinstance(stops, list) else [stops]):
        raise BadRequest("stop cannot contain an empty string.")


def _is_text(prompt: Any) -> bool:
    """Whether prompts are texts, not token ids."""
    return isinstance(prompt[0] if isinstance(prompt, list) and prompt else prompt, str)


def _check_sizes(ask: Ask, model: Model, *, is_text: bool) -> None:
    if ask.n < 1 or ask.n * len(ask.prompts) > CHOICES_LIMIT:
        raise refused(f"n must be between 1 and {CHOICES_LIMIT} answers in a request, got {ask.n}.", "n", ask.n)
    limit = model.max_model_len
    bound = ask.max_tokens
    if bound is not None and bound > limit:
        message = f"max_tokens={bound} cannot be greater than max_model_len={limit}."
        raise refused(f"{message} Please request fewer output tokens.", "max_tokens", bound)
    for prompt in ask.prompts:
        tokens = len(prompt) // TOKEN_BYTES
        if tokens > limit:
            # vLLM stops to tokenise a text one token beyond the limit, and words that number so whatever it came from
            counted = limit + 1 if is_text else tokens
            told = f"at least {counted}" if counted == limit + 1 else str(counted)
            raise refused(
                f"This model's maximum context length is {limit} tokens. However, your prompt contains {told} input "
                "tokens, which exceeds this limit even without any output tokens. Please reduce the length of the "
                "input prompt.",
                "input_tokens",
                counted,
            )
        left = limit - tokens if bound is None else min(bound, limit - tokens)
        if left < 1:
            raise refused(f"max_tokens must be at least 1, got {left}.", "max_tokens", left)
        if ask.min_tokens < 0:
            raise BadRequest(f"min_tokens must be greater than or equal to 0, got {ask.min_tokens}.")
        if ask.min_tokens > left:
            raise BadRequest(f"min_tokens must be less than or equal to max_tokens={left}, got {ask.min_tokens}.")


def _salt(body: dict[str, Any]) -> str | None:
    salt = body.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt):
        raise refused("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    return salt


def _option(body: dict[str, Any], group: str, name: str) -> Any:
    options = body.get(group)
    return options.get(name) if isinstance(options, dict) else None


def _integer(body: dict[str, Any], name: str) -> int | None:
    value = body.get(name)
    if value is not None and type(value) is not int:
        raise invalid("int_type", f"body.{name}", "Input should be a valid integer", value)
    return value


def _number(body: dict[str, Any], name: str, default: float) -> float:
    value = body.get(name)
    return float(value) if isinstance(value, int | float) else default
