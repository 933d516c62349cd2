"""Recorded conversations as full texts: every assistant message is one request whose prompt is everything before it.

Without a tokenizer four bytes count as one token, which is about right for English and code. Equal beginnings of texts
are equal beginnings of chains, exactly.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from kvroute.errors import ConfigError, excerpt
from kvroute.kv.chain import TOKEN_BYTES, Grown, PrefixChain, grow, root_of
from kvroute.sim.workload import Script, Turn, Workload

ROOT = root_of("text")
ROLE, FIELD = b"\x00", b"\x01"  # before a message's role, and before each of its fields


class Conversation(Struct):
    """One line of a file of texts. Unknown fields are ignored."""

    messages: list[dict[str, Any]]
    session_id: str | int | None = None


_decode = msgspec.json.Decoder(Conversation).decode


def read_conversation(line: bytes) -> Conversation:
    """Decode a line.

    Raises:
        ConfigError: it is no conversation.
    """
    try:
        return _decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"a line is no conversation: {error}: {excerpt(line)}") from None


def turns_of(conversation: Conversation, block_size: int) -> Iterator[Turn]:
    """Yield the requests of a conversation."""
    grown = Grown()
    for message in conversation.messages:
        head, content = bytes_of(message)
        if message.get("role") != "assistant":
            grown = grow(grown, head + content, block_size, ROOT)
            continue
        prompt = grow(grown, head, block_size, ROOT)
        grown = grow(prompt, content, block_size, ROOT)
        if prompt.tokens and grown.tokens > prompt.tokens:
            yield Turn(PrefixChain(grown.chain), prompt.tokens, grown.tokens - prompt.tokens)


def bytes_of(message: dict[str, Any]) -> tuple[bytes, bytes]:
    """Return a message as bytes, its role apart; each padded to whole tokens, so that turns end where tokens do."""
    role = message.get("role")
    parts = [] if message.get("content") is None else [_plain(message["content"])]
    parts += [_plain(message[field]) for field in ("tool_calls", "name", "tool_call_id") if message.get(field)]
    return _whole(ROLE + _plain(role)), _whole(b"".join(FIELD + part for part in parts))


def _plain(value: Any) -> bytes:
    return value.encode("utf-8", "surrogatepass") if isinstance(value, str) else msgspec.json.encode(value)


def _whole(data: bytes) -> bytes:
    return data + b" " * (-len(data) % TOKEN_BYTES)


def conversations(lines: Iterator[bytes], starts: Iterator[float], block_size: int) -> Workload:
    """Play the conversations of a file; the k-th begins at the k-th of `starts`."""
    for line, start_s in zip(lines, starts, strict=False):
        yield Script(start_s, turns_of(read_conversation(line), block_size))
