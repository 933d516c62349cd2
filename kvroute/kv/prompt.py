"""A prompt before and after it became a chain.

`PromptSource` is what a request says (messages as values or as they were written, text, token ids); `Prompt` is what
routing needs of it. The step between the two, rendering and tokenising, needs files and engines and lives in
`adapters`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Raw, Struct

from kvroute.kv.chain import HASH_BYTES, PrefixChain, TokenBytes


class ChatPrompt(Struct, frozen=True):
    """A conversation, with every field that changes the tokens which the engine renders from it."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    reasoning_effort: str | None = None


USUAL = ChatPrompt(messages=[])  # the fields of most chats: one value, so that it can be told by its identity


class WrittenChat(Struct, frozen=True):
    """A conversation as the client wrote it: messages that were read before need not be decoded again."""

    messages: list[Raw]  # at least one; JSON that refers to the request's body, so nothing may keep it for long
    tools: Raw  # JSON, "null" for none
    fields: ChatPrompt  # everything else; its messages and tools say nothing

    @property
    def size_bytes(self) -> int:
        """How much was written."""
        return sum(memoryview(written).nbytes for written in (self.tools, *self.messages))

    def decoded(self) -> ChatPrompt:
        """Return the conversation as values.

        Raises:
            DecodeError: a message or a tool is no object, or holds what no decoder takes.
        """
        messages = [msgspec.json.decode(message, type=dict[str, Any]) for message in self.messages]
        return msgspec.structs.replace(self.fields, messages=messages, tools=self.decoded_tools())

    def decoded_tools(self) -> list[dict[str, Any]] | None:
        """Return the tools as values. Raises DecodeError as well."""
        return msgspec.json.decode(self.tools, type=list[dict[str, Any]] | None)


class TextPrompt(Struct, frozen=True):
    """Plain text of a completion request."""

    text: str
    add_special_tokens: bool = True


class TokenPrompt(Struct, frozen=True):
    """Token ids that the client made itself."""

    ids: TokenBytes


PromptSource = ChatPrompt | WrittenChat | TextPrompt | TokenPrompt


class Prompt(Struct, frozen=True):
    """A prompt as routing sees it: a chain of whole blocks, and a length.

    The chain may be shorter than `tokens` allows: it ends before the first image, audio or video.
    """

    chain: PrefixChain
    tokens: int  # length of the prompt in tokens; an estimate where `exact` is False
    block_size: int  # tokens per block
    tail: TokenBytes = TokenBytes(b"")  # the tokens behind the last whole block, where `exact`: an answer goes on there
    exact: bool = True  # False: text chunks, or media whose tokens only the engine knows

    @property
    def hit_limit_blocks(self) -> int:
        """How many leading blocks an engine can at most reuse: it always computes the last token itself."""
        return min(len(self.chain) >> 3, max(0, self.tokens - 1) // self.block_size)

    @property
    def reusable(self) -> PrefixChain:
        """The blocks that an engine can at most reuse."""
        limit = self.hit_limit_blocks * HASH_BYTES
        return self.chain if limit == len(self.chain) else PrefixChain(self.chain[:limit])
