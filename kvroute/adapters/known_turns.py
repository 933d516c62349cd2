"""Conversations that were read before, by the bytes of their messages: one that grew costs only its new messages.

Every message boundary has a key: a hash of all that was written up to there, and of every other field that changes the
prompt. For each chat two boundaries are remembered: behind its last message, where the next turn goes on, and behind
its first, which other conversations share. What lies between a known boundary and the end is decoded, rendered and
tokenised; what lies before it is only hashed.

That is right for templates that render turn by turn (see `turnwise`), and where the text behind each boundary begins
with an added token before which any text may be cut (see `tokenizer`). Everything else is not found here.
"""

from __future__ import annotations

import secrets
from typing import Any

import msgspec
from msgspec import Raw, Struct
from xxhash import xxh3_128

from kvroute.adapters.conversation import CannotRender
from kvroute.adapters.generations import Generations
from kvroute.adapters.known_texts import EMPTY
from kvroute.adapters.render import Opening, Renderer
from kvroute.adapters.tokenizer import Tokenizer
from kvroute.kv.chain import Grown, Root
from kvroute.kv.prompt import USUAL, ChatPrompt, WrittenChat

ENTRY_BYTES = 500  # of an entry besides its chain and tail
START_BYTES = 2_000  # of what chats share, besides its fields
VALUE_FACTOR = 10  # times the bytes of JSON, for the values that were decoded from it
STARTS_SHARE = 8  # of the memory: one part in so many
WALK_LIMIT = 256  # messages looked at from the end of a chat before it counts as new
SHORTEST_BYTES = 512  # of a first message: tokenising less is cheaper than remembering it
USUAL_MAX = 256
NO_TOOLS = Raw(b"null")
FOOT_LIMIT_BYTES = 1_024  # a longer one is no template's own text
SAMPLE = [{"role": role, "content": "x"} for role in ("assistant", "user")]

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(dict[str, Any])


class Known(Struct, frozen=True):
    """A chat up to a message boundary."""

    grown: Grown
    looped: int  # how often the template's loop ran


class Unread(Struct, frozen=True):
    """What of a chat is not known yet: texts, each to be tokenised apart, with the boundary behind it."""

    start: Grown
    texts: list[str]
    boundaries: list[tuple[bytes, int]]  # key, and how often the loop ran up to there
    foot_ids: bytes  # tokens behind the messages


class _Start(Struct, frozen=True):
    """What chats share that differ in their messages only; None: such chats are rendered whole."""

    opening: Opening | None
    foot_ids: bytes = b""


class KnownTurns:
    """Starts of chats by their messages' bytes, bounded in memory.

    Args:
        limit_bytes: what the entries may weigh together.
    """

    def __init__(self, renderer: Renderer, tokenizer: Tokenizer, limit_bytes: int) -> None:
        self.hits = 0  # chats of which a start was known
        self.misses = 0
        self.anchors = _anchors_of(renderer, tokenizer)
        self._renderer = renderer
        self._tokenizer = tokenizer
        self._known: Generations[bytes, Known] = Generations(limit_bytes - limit_bytes // STARTS_SHARE)
        self._starts: Generations[bytes, _Start] = Generations(limit_bytes // STARTS_SHARE)
        self._usual: dict[
            tuple[int, Root], tuple[_Start, xxh3_128]
        ] = {}  # the head of chats with no fields of their own
        self._seed = secrets.randbits(64)  # so that nobody can make two chats that share an entry

    @property
    def used_bytes(self) -> int:
        """What the entries weigh."""
        return self._known.used_bytes + self._starts.used_bytes

    def find(self, chat: WrittenChat, block_size: int, root: Root) -> Unread | None:
        """Return what of a chat is new, as text; None where it has to be read as a whole.

        Raises:
            CannotRender: a message or the chat is not to be rendered turn by turn.
            DecodeError: a message is no object, or holds what no decoder takes.
        """
        if not self.anchors:
            return None
        start, hasher = self._head(chat, block_size, root)
        if start.opening is None:
            return None
        keys = []
        for message in chat.messages:
            hasher.update(message)
            keys.append(hasher.digest())
        count, known = self._deepest(keys)
        if known is None:
            self.misses += 1
            return self._new(chat, keys, start)
        texts, looped = [], known.looped + len(keys) - count
        if count < len(keys):
            texts.append(start.opening.later(list(map(_decoder.decode, chat.messages[count:])), known.looped))
            if not self._may_follow(texts[0]):
                return None
        self.hits += 1
        return Unread(known.grown, texts, [(keys[-1], looped)], start.foot_ids)

    def add(self, boundary: tuple[bytes, int], grown: Grown) -> None:
        """Remember what a chat is up to a boundary that `find` named."""
        key, looped = boundary
        self._known.put(key, Known(grown, looped), ENTRY_BYTES + len(grown.chain) + len(grown.tail))

    def _new(self, chat: WrittenChat, keys: list[bytes], start: _Start) -> Unread:
        """Return a chat of which nothing is known."""
        assert start.opening is not None
        first, *later = map(_decoder.decode, chat.messages)
        text, looped = start.opening.first(first)
        end = (keys[-1], looped + len(later))
        if not later:
            return Unread(EMPTY, [text], [end], start.foot_ids)
        rest = start.opening.later(later, looped)
        if len(text) < SHORTEST_BYTES or not self._may_follow(rest):
            return Unread(EMPTY, [text + rest], [end], start.foot_ids)
        return Unread(EMPTY, [text, rest], [(keys[0], looped), end], start.foot_ids)

    def _deepest(self, keys: list[bytes]) -> tuple[int, Known | None]:
        for count in range(len(keys), max(0, len(keys) - WALK_LIMIT), -1):
            if (known := self._known.get(keys[count - 1])) is not None:
                return count, known
        return 1, self._known.get(keys[0])

    def _head(self, chat: WrittenChat, block_size: int, root: Root) -> tuple[_Start, xxh3_128]:
        """Return what the chat shares with others, and a hash of all that stands before its messages."""
        is_usual = chat.fields is USUAL and chat.tools == NO_TOOLS
        if is_usual and (known := self._usual.get((block_size, root))) is not None:
            return known[0], known[1].copy()
        hasher = xxh3_128(_encoder.encode(chat.fields), self._seed)
        hasher.update(chat.tools)
        start = self._start(hasher.digest(), chat)
        hasher.update(b"%d %d" % (block_size, root))
        if is_usual and len(self._usual) < USUAL_MAX:
            self._usual[block_size, root] = start, hasher.copy()
        return start, hasher

    def _start(self, key: bytes, chat: WrittenChat) -> _Start:
        start = self._starts.get(key)
        if start is None:
            start = self._opened(chat)
            size_bytes = len(_encoder.encode(chat.fields)) + memoryview(chat.tools).nbytes
            self._starts.put(key, start, START_BYTES + (VALUE_FACTOR * size_bytes if start.opening else 0))
        return start

    def _opened(self, chat: WrittenChat) -> _Start:
        before, after = self._tokenizer.surroundings if chat.fields.add_special_tokens else (b"", b"")
        opening = self._renderer.opening_of(msgspec.structs.replace(chat.fields, tools=chat.decoded_tools()))
        if opening is None or before or after:
            return _Start(None)
        foot = opening.foot()
        if not self._may_follow(foot) or len(foot) > FOOT_LIMIT_BYTES:
            return _Start(None)
        return _Start(opening, self._tokenizer.encode(foot))

    def _may_follow(self, text: str) -> bool:
        """Return whether a text that stands behind others may be tokenised apart from them."""
        return not text or text.startswith(self.anchors)


def _anchors_of(renderer: Renderer, tokenizer: Tokenizer) -> tuple[str, ...]:
    """Return the added tokens that messages begin with and that a text may be cut before; none where some do not."""
    try:
        opening = renderer.opening_of(ChatPrompt(messages=[]))
        texts = [] if opening is None else [*(opening.later([message], 1) for message in SAMPLE), opening.foot()]
    except CannotRender:
        return ()
    found = tuple(token for token in tokenizer.anchors if any(text.startswith(token) for text in texts))
    found = tuple(filter(tokenizer.may_cut, found))
    return found if all(text.startswith(found) for text in texts[:-1]) else ()
