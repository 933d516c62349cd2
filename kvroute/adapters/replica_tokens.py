"""Prompts -> token ids by asking a replica's /tokenize, for models whose engine alone knows how.

Every ask has a deadline, a size bound and a bound on how many run at once; whole prompts are remembered by content.
After a few asks in a row without an answer there is a pause, so that a slow replica does not delay every request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
from msgspec import Struct
from xxhash import xxh3_128_digest

from kvroute.adapters.conversation import has_media
from kvroute.adapters.generations import Generations
from kvroute.errors import KvrouteError, ReplicaTimedOut, ReplicaUnreachable
from kvroute.kv.chain import TokenBytes, tokens_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt

Ask = Callable[[str, bytes], Awaitable[bytes]]  # path and JSON body -> body of the answer; raises KvrouteError

ASK_DEADLINE_S = 1.0
ASK_LIMIT_BYTES = 2 << 20  # of a body; longer prompts are approximated
ASKS_AT_ONCE = 16
SILENCES_BEFORE_PAUSE = 3
PAUSE_S = 5.0
ENTRY_BYTES = 200  # of a remembered prompt besides its ids


class CannotAsk(Exception):
    """The replica did not say. The message says why."""


class Tokenized(Struct):
    """The part of /tokenize's answer that counts."""

    tokens: list[int]


class ReplicaTokens:
    """Asks for token ids.

    Args:
        model: the name that replicas serve the model under.
        ask: sends a body to some healthy replica of the model.
        limit_bytes: what the remembered prompts may weigh.
    """

    def __init__(self, model: str, ask: Ask, limit_bytes: int) -> None:
        self.hits = self.misses = self.failures = 0
        self._model = model
        self._ask = ask
        self._known: Generations[bytes, TokenBytes] = Generations(limit_bytes)
        self._asking = 0
        self._silences = 0
        self._paused_until_s = 0.0

    async def ids_of(self, source: ChatPrompt | TextPrompt) -> TokenBytes:
        """Return the token ids that the engine makes of a prompt.

        Raises:
            CannotAsk: no answer in time, a refusal, or a prompt that /tokenize does not take.
        """
        try:
            return await self._known_or_asked(_body_of(self._model, source))
        except CannotAsk:
            self.failures += 1
            raise

    async def _known_or_asked(self, body: bytes) -> TokenBytes:
        key = xxh3_128_digest(body)
        if (ids := self._known.get(key)) is not None:
            self.hits += 1
            return ids
        self.misses += 1
        ids = await self._asked(body)
        self._known.put(key, ids, ENTRY_BYTES + len(ids))
        return ids

    async def _asked(self, body: bytes) -> TokenBytes:
        if len(body) > ASK_LIMIT_BYTES:
            raise CannotAsk(f"a body of {len(body)} bytes is too long to ask about")
        if self._asking >= ASKS_AT_ONCE or asyncio.get_running_loop().time() < self._paused_until_s:
            raise CannotAsk("too many asks at once, or a pause after silence")
        self._asking += 1
        try:
            async with asyncio.timeout(ASK_DEADLINE_S):
                answer = await self._ask("/tokenize", body)
            self._silences = 0
            return tokens_of(msgspec.json.decode(answer, type=Tokenized).tokens)
        except (TimeoutError, ReplicaTimedOut, ReplicaUnreachable) as error:
            self._note_silence()
            raise CannotAsk(f"no answer: {error}") from error
        except (KvrouteError, msgspec.MsgspecError, OverflowError) as error:
            raise CannotAsk(f"no use of the answer: {error}") from error
        finally:
            self._asking -= 1

    def _note_silence(self) -> None:
        self._silences += 1
        if self._silences >= SILENCES_BEFORE_PAUSE:
            self._silences = 0
            self._paused_until_s = asyncio.get_running_loop().time() + PAUSE_S


def _body_of(model: str, source: ChatPrompt | TextPrompt) -> bytes:
    try:
        return msgspec.json.encode({"model": model, **_fields_of(source)})
    except UnicodeEncodeError:
        raise CannotAsk("the prompt holds half of a surrogate pair") from None


def _fields_of(source: ChatPrompt | TextPrompt) -> dict[str, Any]:
    """Return the body of /tokenize for a prompt; fields that it does not know travel as template variables."""
    if isinstance(source, TextPrompt):
        return {"prompt": source.text, "add_special_tokens": source.add_special_tokens}
    if has_media(source.messages):
        raise CannotAsk("the replica would have to fetch media")
    variables = dict(source.chat_template_kwargs or {})
    if source.reasoning_effort is not None:
        variables.setdefault("enable_thinking", source.reasoning_effort != "none")
        variables["reasoning_effort"] = source.reasoning_effort
    if source.documents is not None:
        variables["documents"] = source.documents
    fields = {
        "messages": [_with_reasoning(message) for message in source.messages],
        "add_generation_prompt": source.add_generation_prompt,
        "continue_final_message": source.continue_final_message,
        "add_special_tokens": source.add_special_tokens,
        "tools": source.tools,
        "chat_template": source.chat_template,
        "chat_template_kwargs": variables or None,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _with_reasoning(message: Any) -> Any:
    """Return a message under the field names that /tokenize reads; the chat endpoint takes the older one as well."""
    if not isinstance(message, dict) or message.get("reasoning_content") is None:
        return message
    renamed = {name: value for name, value in message.items() if name != "reasoning_content"}
    renamed["reasoning"] = message["reasoning_content"] if message.get("reasoning") is None else message["reasoning"]
    return renamed
