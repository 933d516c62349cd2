"""The simulated model's tokenizer, chat template and answers.

A token is up to four ASCII characters, or one other character, and its id *is* that text:

  four ASCII characters    their bytes as a little-endian 32-bit integer (shorter ones are padded with zero bytes)
  any other character      0x80000000 + its code point
  special marker           0x80200000 + its number

So tokenising needs no vocabulary, every id below 2**32 is accepted, and decoding gives the text back. An id that names
no text, which only a client can have made up, decodes to U+FFFD. Words keep the space before them (" wor" "ld").

Two laws hold that prefix caching lives from. Text on the two sides of a special marker is tokenised independently, so
a conversation that grows keeps its prefix. And a text cut between two tokens tokenises to the tokens before the cut,
so an answer that was fed back in a conversation gives the ids that were generated.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Sequence
from functools import lru_cache
from random import Random
from typing import Any

from xxhash import xxh3_64_intdigest

from kvroute.errors import BadRequest
from kvroute.kv.chain import TOKEN_BYTES, TokenBytes

VOCABULARY = 2**32  # ids are below it
CHARACTERS = 0x8000_0000
SPECIALS = 0x8020_0000
MARKERS = ("<|im_start|>", "<|im_end|>")
END_OF_TURN = SPECIALS + MARKERS.index("<|im_end|>")

_SPLIT = re.compile("(" + "|".join(re.escape(marker) for marker in MARKERS) + ")")
_PIECE = re.compile(r" [!-~]{1,3}|[!-~]{1,4}|[\x01-\x20\x7f]{1,4}|[^\x01-\x7f]")
_WORD_LIST = (
    "a about after again all also an and any are as at back be because before between block both but by cache call "
    "came can chain change come could day did do down each end even every find first for from get give go good great "
    "group had hand has have he help here high him his hold home house how if in into is it its just keep kind know "
    "large last left less life like line little long look made make many may me mean might more most move much must "
    "my name near need never new next no not now number of off old on once one only open or order other our out over "
    "own page part people place plan point prefix put read right route run said same saw say second see seem set she "
    "should show side small so some state still such system take tell than that the their them then there these they "
    "thing think this those three through time to together token too turn two under until up us use very want was "
    "water way we well went were what when where which while who why will with word work world would write year you "
    "your"
)
_WORDS = _WORD_LIST.split()


@lru_cache(maxsize=65_536)
def _bytes_of(piece: str) -> bytes:
    if piece.isascii() and piece != "\0":
        return piece.encode("ascii").ljust(TOKEN_BYTES, b"\0")
    return (CHARACTERS + ord(piece)).to_bytes(TOKEN_BYTES, "little")


def encode(text: str) -> TokenBytes:
    """Tokenise text; special markers in it become special tokens, whoever wrote them."""
    parts: list[bytes] = []
    for number, segment in enumerate(_SPLIT.split(text)):
        if number % 2:
            parts.append((SPECIALS + MARKERS.index(segment)).to_bytes(TOKEN_BYTES, "little"))
        else:
            parts += map(_bytes_of, _PIECE.findall(segment))
    return TokenBytes(b"".join(parts))


@lru_cache(maxsize=65_536)
def piece_of(token: int) -> str:
    """Return the text of one token."""
    if token < CHARACTERS:
        text = token.to_bytes(TOKEN_BYTES, "little").rstrip(b"\0")
        return text.decode("ascii") if text and text.isascii() and b"\0" not in text else "\ufffd"
    if token < SPECIALS:
        point = token - CHARACTERS
        return chr(point) if point <= 0x10FFFF else "\ufffd"
    return MARKERS[token - SPECIALS] if token - SPECIALS < len(MARKERS) else "\ufffd"


def ids_of(tokens: TokenBytes) -> Sequence[int]:
    """View packed token ids as integers."""
    return memoryview(tokens).cast("I")


def decode(tokens: TokenBytes) -> str:
    """Return the text of tokens, special markers included."""
    return "".join(map(piece_of, ids_of(tokens)))


def render(
    messages: list[dict[str, Any]],
    *,
    tools: list[dict[str, Any]] | None = None,
    documents: list[dict[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Write a conversation the ChatML way. Tools and documents come first, as JSON in a system turn."""
    turns = []
    for name, values in (("Tools", tools), ("Documents", documents)):
        if values:
            turns.append(f"<|im_start|>system\n# {name}\n{_json(values)}<|im_end|>\n")
    turns += [f"<|im_start|>{message.get('role', '')}\n{_content(message)}<|im_end|>\n" for message in messages]
    text = "".join(turns)
    if continue_final_message:
        return text.removesuffix("<|im_end|>\n")
    return text + "<|im_start|>assistant\n" if add_generation_prompt else text


def _content(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise BadRequest(f"content must be a string or a list of parts, got {type(content).__name__}", param="messages")
    text = content if isinstance(content, str) else "\n".join(map(_part, content or ()))
    calls = message.get("tool_calls")
    return f"{text}\n{_json(calls)}" if calls else text


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise BadRequest(f"This model reads text only, not content parts of type {kind!r}", param="messages")


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def answer(prompt: TokenBytes, *, seed: int, index: int, max_tokens: int, min_tokens: int, endless: bool) -> TokenBytes:
    """Return what the model says to a prompt: the same every time, for each seed and choice index.

    The model has said all it wants after 32 to 287 tokens, and then ends its turn; `max_tokens` cuts it off before,
    `min_tokens` makes it go on, and an `endless` one goes on to `max_tokens`.
    """
    draw = xxh3_64_intdigest(b"%d:%d:" % (seed, index) + prompt)
    wanted = max(32 + draw % 256, min_tokens)
    length = max_tokens if endless else min(wanted, max_tokens)
    words = " ".join(Random(draw).choices(_WORDS, k=length))  # a word is at least one token
    said = encode(words)[: length * TOKEN_BYTES]
    if endless or wanted >= max_tokens:
        return TokenBytes(said)
    return TokenBytes(said + array("I", [END_OF_TURN]).tobytes())
