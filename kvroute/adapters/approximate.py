"""Prompts without a tokenizer: four bytes of text count as one token.

The prefix property is kept, which is what routing by prefix needs: a conversation that grew begins with its former
bytes. The lengths are estimates (English and code come to about four bytes a token), and pseudo tokens must never meet
real ones, so their chains have roots of their own. Tools and other fields that templates put first come first.

Nothing is known about what a template adds, or drops of earlier turns; the chain ends before the first media item.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from kvroute.adapters.conversation import modality_of
from kvroute.kv.chain import TOKEN_BYTES, Root, TokenBytes, chain_of
from kvroute.kv.prompt import ChatPrompt, Prompt, TextPrompt

MEDIA_TOKENS = 1_000  # guess for one image, audio or video; only the engine knows
MESSAGE_TOKENS = 4  # of a template's own, per message
ROLE, FIELD = b"\x00", b"\x01"  # before a message's role, and before each of its texts


def approximate(source: ChatPrompt | TextPrompt, block_size: int, root: Root) -> Prompt:
    """Return a prompt made of text chunks."""
    if isinstance(source, TextPrompt):
        data, rest_tokens = _bytes_of(source.text), 0
    else:
        data, rest_tokens = _chat_bytes(source)
    ids = TokenBytes(data[: len(data) // TOKEN_BYTES * TOKEN_BYTES])
    chain = chain_of(ids, block_size, Root(xxh3_64_intdigest(b"text", root)))
    return Prompt(chain=chain, tokens=len(ids) // TOKEN_BYTES + rest_tokens, block_size=block_size, exact=False)


def estimate_tokens(chat: ChatPrompt) -> int:
    """Return about how many tokens a chat has, its media included."""
    data, rest_tokens = _chat_bytes(chat)
    return len(data) // TOKEN_BYTES + rest_tokens


def _chat_bytes(chat: ChatPrompt) -> tuple[bytes, int]:
    """Return a chat's bytes up to its first media item, and a guess at the tokens that are not among them."""
    head = (chat.tools, chat.documents, chat.reasoning_effort, chat.chat_template, chat.chat_template_kwargs)
    pieces = [b"" if field is None else FIELD + _json_of(field) for field in head]
    media, texts_after = 0, 0
    for message in chat.messages:
        for piece in _message_pieces(message):
            media += piece is None
            if piece is not None and media:
                texts_after += len(piece)
            elif piece is not None:
                pieces.append(piece)
    tokens = media * MEDIA_TOKENS + texts_after // TOKEN_BYTES + MESSAGE_TOKENS * len(chat.messages)
    return b"".join(pieces), tokens


def _message_pieces(message: Any) -> Iterator[bytes | None]:
    """Yield a message's parts in order; None for a media item."""
    if not isinstance(message, dict):
        return
    yield ROLE + _bytes_of(message.get("role"))
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        is_media = modality_of(part) is not None
        yield None if is_media else FIELD + _bytes_of(part.get("text") if isinstance(part, dict) else part)
    if message.get("tool_calls"):
        yield FIELD + _json_of(message["tool_calls"])


def _bytes_of(text: Any) -> bytes:
    return text.encode("utf-8", "surrogatepass") if isinstance(text, str) else b""


def _json_of(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except UnicodeEncodeError:  # half of a surrogate pair, which the standard library writes as an escape
        return json.dumps(value).encode()
