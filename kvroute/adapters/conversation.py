"""A client's messages -> the conversation that a chat template is given, as vLLM prepares it.

Chat templates expect one of two forms of content: one string, or the list of parts. In the first form text parts are
joined by line breaks and media placeholders come first. The placeholders' own text depends on the model and cannot be
known here, so a `mark` may be put where the first media item would start: what is rendered before it is certain.

This file knows neither templates nor tokens, and never changes its input. The facts are vLLM 0.33's
(`renderers/chat_utils.py`, `entrypoints/openai/chat_completion/protocol.py`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

Message = dict[str, Any]

TEXT_FIELDS = {
    "text": "text",
    "input_text": "text",
    "output_text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
MODALITIES = {
    "image_url": "image", "input_image": "image", "image_pil": "image", "image_embeds": "image",
    "audio_url": "audio", "input_audio": "audio", "audio_embeds": "audio",
    "video_url": "video", "video_embeds": "video", "prompt_embeds": "prompt_embeds",
}  # fmt: skip
KNOWN_FIELDS = {  # of content parts; other fields travel to templates that take parts
    "type", "text", "refusal", "thinking", "name", "uuid", "data", "file", "closed", "prompt_cache_breakpoint",
    "image_url", "image_pil", "image_embeds", "audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds",
}  # fmt: skip
BILLING_HEADER = "x-anthropic-billing-header"  # a line that changes with every request; engines drop it since 0.32


class CannotRender(Exception):
    """This prompt's text cannot be known here. The message says why; the engine may refuse it too, in its own words."""


def modality_of(part: Any) -> str | None:
    """Return what kind of media a content part carries; None for text."""
    if not isinstance(part, dict):
        return None
    kind = part.get("type")
    if not isinstance(kind, str | None):
        return None  # whatever it is, the engine refuses it or ignores it
    if kind in TEXT_FIELDS or kind == "tool_reference":
        return None
    if kind in MODALITIES:
        return MODALITIES[kind]
    return next((MODALITIES[key] for key in part if key in MODALITIES), None)


def has_media(messages: Iterable[Any]) -> bool:
    """Return whether any message carries an image, audio, video or embeddings."""
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list) and any(map(modality_of, content)):
            return True
    return False


def conversation_of(messages: Sequence[Any], *, as_parts: bool, mark: str | None = None) -> list[Message]:
    """Return the conversation that the template receives.

    With a `mark`, it stands where the first media item begins, and the conversation is good only up to there.

    Raises:
        CannotRender: a message that the engine refuses as well.
    """
    conversation = []
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise CannotRender("every message needs a role")
        role, content = message["role"], message.get("content")
        if isinstance(content, str) and not as_parts and not (role == "system" and content.startswith(BILLING_HEADER)):
            prepared: Message = {"role": role, "content": content}
        else:
            prepared = {"role": role, "content": _content_of(role, content, as_parts, mark)}
        if len(message) > 2 or content is None or role == "developer":
            _add_fields(prepared, message)
        conversation.append(prepared)
    return conversation


def _content_of(role: str, content: Any, as_parts: bool, mark: str | None) -> str | list[dict[str, Any]]:
    parts = [content] if isinstance(content, str) else [] if content is None else content
    if not isinstance(parts, list):
        raise CannotRender("content is neither text nor a list of parts")
    wrapped = [part for part in (_part_of(part, mark) for part in parts) if part is not None]
    if role == "system":
        wrapped = [part for part in map(_without_billing_header, wrapped) if part is not None]
    if as_parts:
        plain = role == "tool" and all(part["type"] == "text" for part in wrapped)
        return "\n".join(part["text"] for part in wrapped) if plain else wrapped
    return _joined([part for part in wrapped if part["type"] == "text"], mark)


def _part_of(part: Any, mark: str | None) -> dict[str, Any] | None:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if (modality := modality_of(part)) is not None:
        return {"type": modality, **_other_fields(part)} if mark is None else {"type": "text", "text": mark}
    kind = part.get("type") if isinstance(part, dict) else None
    if kind == "tool_reference":
        return {"type": "tool_reference", "name": part.get("name")}
    text = part.get(TEXT_FIELDS[kind]) if kind in TEXT_FIELDS else None
    if text is None and kind in ("text", "refusal"):
        return None  # the engine skips it with a warning
    if not isinstance(text, str):
        raise CannotRender(f"unknown or empty content part of type {kind!r}")
    return {"type": "text", "text": text, **_other_fields(part)}


def _other_fields(part: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name not in KNOWN_FIELDS}


def _without_billing_header(part: dict[str, Any]) -> dict[str, Any] | None:
    text = part.get("text")
    if not isinstance(text, str) or not text.startswith(BILLING_HEADER):
        return part
    rest = text.partition("\n")[2]
    return {**part, "text": rest} if rest else None


def _joined(parts: list[dict[str, Any]], mark: str | None) -> str:
    """Join text parts; what stands for a media item comes before all text of its message."""
    texts = [part["text"] for part in parts if part["text"]]
    return "\n".join([mark, *texts] if mark is not None and mark in texts else texts)


def _add_fields(prepared: Message, message: Message) -> None:
    role = prepared["role"]
    if role == "assistant":
        if calls := message.get("tool_calls"):
            if not isinstance(calls, list):
                raise CannotRender("tool_calls is no list")
            prepared["tool_calls"] = [_tool_call_of(call) for call in calls]
        reasoning = message.get("reasoning")
        reasoning = message.get("reasoning_content") if reasoning is None else reasoning
        if reasoning is not None:
            prepared["reasoning"] = prepared["reasoning_content"] = reasoning
    elif role == "tool" and "tool_call_id" in message:
        prepared["tool_call_id"] = message["tool_call_id"]
    elif role == "developer":
        prepared["tools"] = message.get("tools")
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            prepared[field] = message[field]


def _tool_call_of(call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, in the field order that the engine's schema gives it."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type", "function") != "function":
        raise CannotRender("tool_calls must be functions")
    first: dict[str, Any] = {"id": call["id"]} if "id" in call else {}
    ordered = {"arguments": _arguments_of(function.get("arguments")), "name": function.get("name")}
    known = {
        "function": {**ordered, **{key: function[key] for key in function if key not in ordered}},
        "type": "function",
    }
    return {**first, **known, **{key: call[key] for key in call if key not in ("id", "function", "type")}}


def _arguments_of(arguments: Any) -> dict[str, Any]:
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments) if arguments else {}
        except ValueError:
            return {}  # as the engine does: a broken call of an earlier turn must not end the conversation
    return arguments if isinstance(arguments, dict) else {}


def tools_of(tools: list[dict[str, Any]] | None) -> list[dict[str, Any]] | None:
    """Return tool definitions with the fields, defaults and order that the engine's schema gives them."""
    return None if tools is None else [_tool_of(tool) for tool in tools]


def _tool_of(tool: Any) -> dict[str, Any]:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict):
        raise CannotRender("every tool needs a function")
    kept = {field: function.get(field) for field in ("name", "description", "parameters")}
    deferred = tool.get("defer_loading")
    if function.get("strict") is not None:
        kept["strict"] = function["strict"]
    if (inner := deferred if function.get("defer_loading") is None else function["defer_loading"]) is not None:
        kept["defer_loading"] = inner
    return {"type": "function", "function": kept, **({} if deferred is None else {"defer_loading": deferred})}


def without_developer(conversation: list[Message]) -> list[Message]:
    """Turn developer messages into one system message, for templates that do not know that role."""
    turned = [{**m, "role": "system"} if m["role"] == "developer" else m for m in conversation]
    for message in turned:
        if message["role"] == "system":
            message.pop("tools", None)
    systems = [index for index, message in enumerate(turned) if message["role"] == "system"]
    if systems in ([], [0]):
        return turned
    texts = [_text_of(turned[index]["content"]) for index in systems]
    merged = {"role": "system", "content": "\n\n".join(text for text in texts if text)}
    return [merged, *(message for message in turned if message["role"] != "system")]


def _text_of(content: str | list[dict[str, Any]]) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
