"""Asking for usage on the client's behalf, in a body whose other bytes stay as they are.

Where the client sent no `stream_options`, they go in front of the first member. Where it did, the value of the last one
(the one that decoders keep) is replaced. `UsageStrip` in sse.py takes the answer's side of the bargain back out.

Only for one answer of one prompt: with several, the engine moves `system_fingerprint` from the last chunk of every
choice to the usage chunk, and it could not be put back before the last choice has ended.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import UNSET

from kvroute.proxy.openai import Inference

EDIT_BYTES_MAX = 4 << 20  # of a body whose stream_options must be looked for
_INSERT = b'"stream_options":{"include_usage":true},'
_STRING_OR_BRACKET = re.compile(rb'"(?:[^"\\]|\\.)*+"|[{}\[\]]', re.DOTALL)
_COLON = re.compile(rb"\s*:\s*")


def with_usage(body: bytes, inference: Inference) -> bytes | None:
    """Return the body with usage asked for; None where it must or need not be touched.

    It is left alone where the client asked itself, where it does not stream, where several answers come in one stream,
    and where prompt or options are so odd that the engine may refuse them, in words that count the body's fields.
    """
    if not inference.sources or not inference.stream or inference.sequences != 1:
        return None
    options = inference.stream_options
    if options is UNSET:
        start = body.index(b"{") + 1
        return b"".join((body[:start], _INSERT, body[start:]))
    wanted = _wanted(options)
    span = _options_span(body) if wanted is not None and len(body) <= EDIT_BYTES_MAX else None
    if wanted is None or span is None:
        return None
    return b"".join((body[: span[0]], wanted, body[span[1] :]))


def asks_for_usage(inference: Inference) -> bool:
    """Say whether the client asked for usage itself."""
    return isinstance(inference.stream_options, dict) and bool(inference.stream_options.get("include_usage"))


def _wanted(options: Any) -> bytes | None:
    if options is None:
        return b'{"include_usage":true}'
    if not isinstance(options, dict) or options.get("include_usage") not in (None, False):
        return None
    wanted = {**options, "include_usage": True}
    if "continuous_usage_stats" in options:  # without effect before, it must stay without
        wanted["continuous_usage_stats"] = False
    try:
        return msgspec.json.encode(wanted)
    except (msgspec.MsgspecError, OverflowError, ValueError):
        return None


def _options_span(body: bytes) -> tuple[int, int] | None:
    """Find the value of the last top-level `stream_options`: an object or null."""
    depth, found, opened = 0, None, None
    for token in _STRING_OR_BRACKET.finditer(body):
        first = body[token.start()]
        if first == ord('"'):
            if depth == 1 and (colon := _COLON.match(body, token.end())) and _names_options(token[0]):
                start = colon.end()
                found = (start, start + 4) if body.startswith(b"null", start) else None
                opened = start if body[start : start + 1] == b"{" else None
        elif first in b"{[":
            depth += 1
        else:
            depth -= 1
            if depth == 1 and opened is not None:
                found, opened = (opened, token.end()), None
    return found


def _names_options(key: bytes) -> bool:
    return key == b'"stream_options"' or (b"\\" in key and msgspec.json.decode(key) == "stream_options")
