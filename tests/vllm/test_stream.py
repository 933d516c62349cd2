"""A stream through the router beside one straight from the engine."""

from __future__ import annotations

import re
import urllib.request
from collections.abc import Callable

import msgspec
import pytest

PROMPT = "import asyncio\n\n" * 40  # several blocks, so that usage has cached tokens to tell
TWO = [PROMPT, PROMPT + "x"]
CHAT = {"messages": [{"role": "system", "content": PROMPT}, {"role": "user", "content": "Go on."}]}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
USAGE = {"stream_options": {"include_usage": True}}
TRIES = 20  # of one case
CASES = {
    "chat": ("/v1/chat/completions", CHAT),
    "chat with usage": ("/v1/chat/completions", CHAT | USAGE),
    "chat without usage": ("/v1/chat/completions", CHAT | {"stream_options": {"include_usage": False}}),
    "chat, null options": ("/v1/chat/completions", CHAT | {"stream_options": None}),
    "chat, running usage": (
        "/v1/chat/completions",
        CHAT | {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    ),
    "tools": ("/v1/chat/completions", CHAT | {"tools": [TOOL]} | USAGE),
    "token ids": ("/v1/chat/completions", CHAT | {"return_token_ids": True}),
    "completion": ("/v1/completions", {"prompt": PROMPT}),
    "completion with usage": ("/v1/completions", {"prompt": PROMPT} | USAGE),
    "two prompts": ("/v1/completions", {"prompt": TWO}),
}


def stream(url: str, path: str, fields: dict[str, object]) -> bytes:
    """Return the whole body of a streamed answer, with ids and times blanked."""
    body = {"model": "tiny", "max_tokens": 12, "temperature": 0, "stream": True, **fields}
    request = urllib.request.Request(url + path, msgspec.json.encode(body), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        data = answer.read()
    data = re.sub(rb'"id":"(chatcmpl|cmpl)-[^"]*"', b'"id":""', data)
    data = re.sub(rb'"created":\d+', b'"created":0', data)
    if fields.get("prompt") == TWO:  # events of answers that are generated side by side come in no fixed order
        return b"\n\n".join(sorted(data.split(b"\n\n")))
    return data


def alike(one: Callable[[], bytes], other: Callable[[], bytes]) -> bool:
    """Whether two streams are equal, tried again: an engine that is late puts two tokens into one event."""
    ones: set[bytes] = set()
    others: set[bytes] = set()
    for _ in range(TRIES):
        ones.add(one())
        others.add(other())
        if ones & others:
            return True
    return False


@pytest.mark.parametrize("case", CASES)
def test_a_stream_through_the_router_equals_a_direct_one(router, engines, case):
    """Byte for byte, ids and times aside: what the router adds for itself it takes out again."""
    path, fields = CASES[case]
    for url in engines.urls:  # warm both, so that all reuse the same tokens
        stream(url, path, fields)
    assert alike(lambda: stream(router.url, path, fields), lambda: stream(engines.urls[0], path, fields))
