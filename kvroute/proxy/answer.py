"""What an answer says once it is over: the engine's counts, and the text that the index can learn from.

Nothing here runs while a client waits. Text is only taken where it is the whole of what was generated, one choice
without tool calls or reasoning; whether it re-tokenises to what the engine generated is checked by the reader.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from kvroute.proxy.sse import events_of
from kvroute.routing.demand import Usage

REASON_CHARS_MAX = 500


class _Details(Struct):
    cached_tokens: int | None = None


class _Counts(Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Message(Struct):
    content: str | None = None
    tool_calls: Any = None
    function_call: Any = None
    reasoning: Any = None
    reasoning_content: Any = None

    @property
    def is_plain(self) -> bool:
        return not (self.tool_calls or self.function_call or self.reasoning or self.reasoning_content)


class _Choice(Struct):
    message: _Message | None = None
    delta: _Message | None = None
    finish_reason: str | None = None


class _Error(Struct):
    message: str = ""


class _Refusal(Struct):
    error: _Error


class _Answer(Struct):
    choices: list[_Choice] = []
    usage: _Counts | None = None


def usage_in_event(event: bytes) -> Usage | None:
    """Return the counts of the event that carried usage."""
    answer = _decoded(event.removeprefix(b"data: "), _Answer) if event else None
    return _usage(answer)


def text_of_events(events: bytes) -> str | None:
    """Return the text of a chat stream, None where it is not the whole of what was generated."""
    parts = [event[6:] for event in events_of(events) if event.startswith(b"data: {")]
    chunks = _decoded(b"[%b]" % b",".join(parts), list[_Answer])
    if chunks is None:
        return None
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices if choice.delta is not None]
    if not all(delta.is_plain for delta in deltas):
        return None
    return "".join(delta.content or "" for delta in deltas)


def read_body(body: bytes) -> tuple[Usage | None, str | None]:
    """Return counts and text of an answer that came in one piece."""
    answer = _decoded(body, _Answer)
    if answer is None or len(answer.choices) != 1:
        return _usage(answer), None
    message = answer.choices[0].message
    return _usage(answer), message.content if message is not None and message.is_plain else None


def was_aborted(body: bytes) -> bool:
    """Say whether an answer in one piece was ended by the engine instead of by the model."""
    if b'"abort"' not in body:
        return False
    answer = _decoded(body, _Answer)
    return answer is not None and any(choice.finish_reason == "abort" for choice in answer.choices)


def reason(body: bytes) -> str:
    """Return the message of an error's body, "" where it has none."""
    refusal = _decoded(body, _Refusal)
    return refusal.error.message[:REASON_CHARS_MAX] if refusal is not None else ""


def _usage(answer: _Answer | None) -> Usage | None:
    if answer is None or answer.usage is None:
        return None
    counts, details = answer.usage, answer.usage.prompt_tokens_details
    prompt_tokens = max(0, counts.prompt_tokens)
    cached = details.cached_tokens if details else None
    return Usage(
        prompt_tokens,
        max(0, counts.completion_tokens),
        None if cached is None else min(max(0, cached), prompt_tokens),
    )


def _decoded(data: bytes, kind: Any) -> Any:
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
