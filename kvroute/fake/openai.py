"""The bodies of OpenAI's API as vLLM writes them: whole answers, stream chunks, usage, errors, model cards.

Field names and their order follow vLLM 0.32, nulls included, because routers and clients lean on them.
"""

from __future__ import annotations

from typing import Any

import orjson
from msgspec import Struct

from kvroute import __version__
from kvroute.errors import KvrouteError

FINGERPRINT = f"kvroute-sim-{__version__}"


class Reply(Struct, frozen=True):
    """What all bodies of one answer share."""

    id: str
    created: int  # Unix time, seconds
    model: str
    is_chat: bool


class Choice(Struct, frozen=True):
    """A piece of one answer, or all of it."""

    index: int
    text: str
    token_ids: list[int] | None = None
    finish_reason: str | None = None
    prompt_ids: list[int] | None = None  # where the client asked for token ids


class Count(Struct, frozen=True):
    """The token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    created_cache_tokens: int | None  # prompt tokens in blocks that were new to the cache; None: not told

    def as_json(self) -> dict[str, Any]:
        """Write the counts without their details."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "completion_tokens": self.completion_tokens,
        }


def event(body: dict[str, Any]) -> bytes:
    """Write one server-sent event."""
    return b"data: " + orjson.dumps(body) + b"\n\n"


DONE = b"data: [DONE]\n\n"


def whole(reply: Reply, choices: list[Choice], count: Count) -> dict[str, Any]:
    """Write an answer that is not streamed."""
    details = {
        "cached_tokens": count.cached_tokens,
        "created_cache_tokens": count.created_cache_tokens,
        "multimodal_tokens": None,
    }
    usage = {**count.as_json(), "prompt_tokens_details": details, "completion_tokens_details": None}
    body: dict[str, Any] = {
        "id": reply.id,
        "object": "chat.completion" if reply.is_chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": [(_message if reply.is_chat else _text)(choice) for choice in choices],
        "service_tier": None,
        "system_fingerprint": FINGERPRINT,
        "usage": usage,
    }
    if reply.is_chat:
        body |= {"prompt_logprobs": None, "prompt_token_ids": choices[0].prompt_ids, "prompt_text": None}
    return body | {"kv_transfer_params": None, "ec_transfer_params": None, "metrics": None}


def _message(choice: Choice) -> dict[str, Any]:
    message = {
        "role": "assistant",
        "content": choice.text,
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "reasoning": None,
    }
    return {
        "index": choice.index,
        "message": message,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        "token_ids": choice.token_ids,
        "routed_experts": None,
    }


def _text(choice: Choice) -> dict[str, Any]:
    return {
        "index": choice.index,
        "text": choice.text,
        "logprobs": None,
        "finish_reason": choice.finish_reason,
        "stop_reason": None,
        "token_ids": choice.token_ids,
        "prompt_logprobs": None,
        "prompt_token_ids": choice.prompt_ids,
        "routed_experts": None,
    }


def _chunk(reply: Reply, choices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": reply.id,
        "object": "chat.completion.chunk" if reply.is_chat else "text_completion",
        "created": reply.created,
        "model": reply.model,
        "choices": choices,
    }


def role_chunk(reply: Reply, index: int, prompt_ids: list[int] | None, count: Count | None) -> dict[str, Any]:
    """Write the first chunk of a chat stream's choice. `count` is given for continuous usage."""
    delta = {"role": "assistant", "content": ""}
    body = _chunk(reply, [{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
    return _with_running_usage(body, count) | {"prompt_token_ids": prompt_ids, "prompt_text": None}


def delta_chunk(reply: Reply, choice: Choice, count: Count | None, *, is_signed: bool) -> dict[str, Any]:
    """Write a chunk with text; `is_signed` puts the fingerprint on it, which the last one of a choice carries."""
    item: dict[str, Any] = {"index": choice.index}
    if reply.is_chat:
        item |= {"delta": {"content": choice.text}, "logprobs": None, "finish_reason": choice.finish_reason}
        if choice.finish_reason is not None:
            item["stop_reason"] = None
    else:
        item |= {"text": choice.text, "logprobs": None, "finish_reason": choice.finish_reason, "stop_reason": None}
        item["prompt_token_ids"] = choice.prompt_ids
    item["token_ids"] = choice.token_ids
    body = _with_running_usage(_chunk(reply, [item]), count)
    return body | {"system_fingerprint": FINGERPRINT} if is_signed else body


def usage_chunk(reply: Reply, count: Count) -> dict[str, Any]:
    """Write the last chunk of a stream whose client asked for usage."""
    details = {"cached_tokens": count.cached_tokens}
    if count.created_cache_tokens is not None:
        details["created_cache_tokens"] = count.created_cache_tokens
    usage = {**count.as_json(), "prompt_tokens_details": details}
    return _chunk(reply, []) | {"usage": usage, "system_fingerprint": FINGERPRINT}


def _with_running_usage(body: dict[str, Any], count: Count | None) -> dict[str, Any]:
    if count is None:
        return body
    return body | {"usage": {**count.as_json(), "completion_tokens_details": None}}


def error(failure: KvrouteError) -> dict[str, Any]:
    """Write an error body."""
    return {"error": {"message": failure.message, "type": failure.kind, "param": failure.param, "code": failure.status}}


def models(name: str, max_model_len: int, created: int) -> dict[str, Any]:
    """Write the list of models, which holds one."""
    permission = {
        "id": f"modelperm-{name}",
        "object": "model_permission",
        "created": created,
        "allow_create_engine": False,
        "allow_sampling": True,
        "allow_logprobs": True,
        "allow_search_indices": False,
        "allow_view": True,
        "allow_fine_tuning": False,
        "organization": "*",
        "group": None,
        "is_blocking": False,
    }
    card = {
        "id": name,
        "object": "model",
        "created": created,
        "owned_by": "vllm",
        "root": name,
        "parent": None,
        "max_model_len": max_model_len,
        "permission": [permission],
    }
    return {"object": "list", "data": [card]}
