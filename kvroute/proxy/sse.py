"""What an event stream says, read in passing.

`EventStream` is fed the bytes of a stream as they arrive and returns the bytes to pass on: whole events, unchanged.
Only events that carry a finish reason, usage or an error are decoded; the others, which are nearly all, cost a few
searches for a substring. In JSON a quote inside a string is escaped, so a word found with its quotes is a key.

Where usage was asked for on the client's behalf (see splice.py), the engine says two things differently from what the
client would have seen, and both are undone: a chunk with usage and no choices comes last, and `system_fingerprint` is
on that chunk instead of on the one with the finish reason (vLLM 0.32, serving.py of chats and completions). An engine
that is set to send usage to everybody sends it with every chunk; that is left as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import Any

import msgspec
from msgspec import Raw, Struct

PARTIAL_BYTES_MAX = 8 << 20  # of an event whose end has not come; beyond, it is passed on as it is
KEPT_BYTES_MAX = 512 << 10  # of events kept for reading the answer's text after the end
_END = b"\n\n"
_DATA = b"data: "


class Opening(Enum):
    """What the first events of a stream mean for the client."""

    WAIT = "nothing was said yet"
    SERVED = "the engine answers"
    REFUSED = "the engine has not served the request"


class _Choice(Struct):
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None


class _Event(Struct):
    choices: list[_Choice] | None = None
    error: Any = None


class _Last(Struct):
    choices: list[Raw] = []
    system_fingerprint: Raw = Raw(b"")  # as it was written; empty where it is absent


class _Failure(Struct):
    message: str = ""
    code: Any = None


class _Refusal(Struct):
    error: _Failure | None = None


class EventStream:
    """One stream: what was passed on, what is held back, and what it said about itself."""

    def __init__(self, *, strips_usage: bool = False, keeps_text: bool = False) -> None:
        self.failure: str | None = None  # the engine's own words, where it failed in this stream
        self.usage_event = b""  # the last event that carried usage
        self.kept: list[bytes] | None = [] if keeps_text else None  # events with the answer's text; None: not wanted
        self._kept_bytes = 0
        self._strips_usage = strips_usage
        self._partial = b""
        self._held: list[bytes] = []  # the last chunk of the choice, and what came since, until usage has come

    def feed(self, data: bytes) -> bytes:
        """Take bytes in; return the whole events to pass on."""
        if self._partial:
            data = self._partial + data
            self._partial = b""
        if not data.endswith(_END):
            end = data.rfind(_END) + len(_END)
            data, self._partial = (data[:end], data[end:]) if end >= len(_END) else (b"", data)
            if len(self._partial) > PARTIAL_BYTES_MAX:
                data, self._partial = data + self._partial, b""
        if b'"finish_reason":"' in data or b'"usage"' in data or b'"error"' in data or self._held:
            data = self._read(data)
        if self.kept is not None:
            self._keep(data)
        return data

    def finish(self) -> bytes:
        """Return what is left when the stream has ended."""
        rest, self._partial = self._partial, b""
        return self.held() + rest

    def held(self) -> bytes:
        """Return whole events that were held back, now that what they waited for will not come."""
        return b"".join(self._released())

    def _keep(self, data: bytes) -> None:
        self._kept_bytes += len(data)
        if self.kept is None or self._kept_bytes > KEPT_BYTES_MAX:
            self.kept = None
        else:
            self.kept.append(data)

    def _read(self, data: bytes) -> bytes:
        passed: list[bytes] = []
        for event in events_of(data):
            self._note(event)
            passed += self._stripped(event) if self._strips_usage else (event,)
        return b"".join(passed)

    def _note(self, event: bytes) -> None:
        if b'"usage":{' in event:
            self.usage_event = event
        if failure := failure_in(event):
            self.failure = failure

    def _stripped(self, event: bytes) -> list[bytes]:
        """Return the events to pass on in place of this one."""
        if self._held and event.startswith(b":"):
            self._held.append(event)
            return []
        if b'"usage":{' in event and (last := _decoded(event, _Last)) is not None:
            if not last.choices:
                return self._released(bytes(last.system_fingerprint))
            self._strips_usage = False
        before = self._released()
        if b'"finish_reason":"' in event and b'"system_fingerprint"' not in event:
            self._held.append(event)
            return before
        return [*before, event]

    def _released(self, fingerprint: bytes = b"") -> list[bytes]:
        held, self._held = self._held, []
        if held and fingerprint:
            end = held[0].rindex(b"}")
            held[0] = b'%b,"system_fingerprint":%b%b' % (held[0][:end], fingerprint, held[0][end:])
        return held


def opening(events: bytes) -> Opening:
    """Judge the first events of a stream.

    A chat's first chunk names the role and says nothing; a request that was never served ends right after it. A comment
    counts as an answer: who has the engine send them wants the client to see them while it waits.
    """
    for event in events_of(events):
        chunk = _decoded(event, _Event)
        if failure_in(event):
            return Opening.REFUSED
        if chunk is None or not chunk.choices:
            return Opening.SERVED
        for choice in chunk.choices:
            if choice.text or choice.finish_reason or _says_something(choice.delta):
                return Opening.SERVED
    return Opening.WAIT


def failure_in(event: bytes) -> str | None:
    """Return the engine's words where an event says that it failed. Its answers to bad requests do not count."""
    if b'"finish_reason":"abort"' in event:
        return "the engine aborted the request"
    if b'"error"' not in event:
        return None
    if event.startswith(b"event: error"):
        return "the engine sent an error event"
    refusal = _decoded(event, _Refusal)
    if refusal is None or refusal.error is None:
        return None
    code = refusal.error.code
    return None if isinstance(code, int) and 400 <= code < 500 else refusal.error.message or "unknown error"


def events_of(data: bytes) -> Iterator[bytes]:
    """Split into events, each with its empty line."""
    start = 0
    while (end := data.find(_END, start)) >= 0:
        yield data[start : end + 2]
        start = end + 2
    if start < len(data):
        yield data[start:]


def error_event(body: bytes) -> bytes:
    """Return an error as an event, as vLLM sends it in the middle of a stream."""
    return b"data: %b\n\n" % body


def _says_something(delta: dict[str, Any] | None) -> bool:
    return delta is not None and any(value for key, value in delta.items() if key != "role")


def _decoded(event: bytes, kind: type[Any]) -> Any:
    """Decode an event's data, None where it is not of that shape."""
    if not event.startswith(_DATA):
        return None
    try:
        return msgspec.json.decode(event[len(_DATA) :], type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError):
        return None
