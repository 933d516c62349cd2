"""Our tokens of a few prompts beside a replica's /tokenize: what `kvroute doctor` asks about templates and tokenizers.

One reader of files for all replicas of a model: a big tokenizer takes a second to load. It may not ask replicas, so
that what it says is what the files say.
"""

from __future__ import annotations

import asyncio
from array import array
from itertools import zip_longest

from kvroute.adapters.model_files import find_model
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.adapters.replica_tokens import CannotAsk, ReplicaTokens
from kvroute.adapters.tokens import PROBE_CHAT, PROBE_TEXT, WHOLE, PromptReader, open_reader
from kvroute.kv.chain import TokenBytes, root_of
from kvroute.kv.prompt import ChatPrompt, TextPrompt
from kvroute.routing.findings import TokensFacts
from kvroute.routing.replica import ModelCard

REMEMBERED_BYTES = 1 << 20
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Return the weather of a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
CALL = {
    "id": "call_0001a",
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 2}'},
}
TOOL_CHAT = ChatPrompt(
    messages=[
        {"role": "user", "content": "Will it rain in Zürich?"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": CALL["id"], "content": '{"rain": true}'},
    ],
    tools=[WEATHER],
)
PLAIN_CHAT = ChatPrompt(messages=[{"role": "user", "content": "Hello! How are you?"}])
PROMPTS: dict[str, ChatPrompt | TextPrompt] = {
    "a chat": PLAIN_CHAT,
    "a system prompt": PROBE_CHAT,
    "a tool call": TOOL_CHAT,
    "a completion": PROBE_TEXT,
}


class Readers:
    """The files' readers, one a model and root, opened at first need."""

    def __init__(self, setting: str) -> None:
        """Take "auto", "none" or a directory.

        Raises:
            ConfigError: it names a directory without a tokenizer.
        """
        if setting not in ("auto", "none"):
            find_model(setting, None, "", {})
        self.setting = setting
        self._readers: dict[tuple[str, str | None], PromptReader] = {}
        self._opening = asyncio.Lock()

    async def of(self, card: ModelCard) -> PromptReader:
        """Return a model's reader.

        Raises:
            ConfigError: the files of the directory that was named cannot be used.
        """
        async with self._opening:
            key = (card.name, card.root)
            if key not in self._readers:
                reader = await open_reader(self.setting, card.root, card.name, None)
                await reader.start()
                self._readers[key] = reader
            return self._readers[key]

    async def close(self) -> None:
        """End the readers' threads."""
        for reader in self._readers.values():
            await reader.close()


class Tokens:
    """Tokenises for one replica: by our files, and by itself."""

    def __init__(self, reader: PromptReader, client: ReplicaClient, model: str) -> None:
        self._reader = reader
        self._replica = ReplicaTokens(model, client.ask, REMEMBERED_BYTES)

    async def ours(self, prompt: ChatPrompt | TextPrompt) -> TokenBytes | None:
        """Return the ids that our files give, None where they cannot."""
        read = await self._reader.read(prompt, block_size=WHOLE, root=root_of(""))
        return read.tail if read.exact else None

    async def best(self, prompt: ChatPrompt | TextPrompt) -> TokenBytes | None:
        """Return our files' ids, else the replica's, else None."""
        if (ids := await self.ours(prompt)) is not None:
            return ids
        try:
            return await self._replica.ids_of(prompt)
        except CannotAsk:
            return None

    async def compared(self) -> tuple[TokensFacts, ...]:
        """Compare all prompts, one after the other."""
        return tuple([await self._compare(name, prompt) for name, prompt in PROMPTS.items()])

    async def _compare(self, name: str, prompt: ChatPrompt | TextPrompt) -> TokensFacts:
        ours, theirs, why = await self.ours(prompt), None, self._reader.why
        try:
            theirs = await self._replica.ids_of(prompt)
        except CannotAsk as error:
            why = str(error)
        return TokensFacts(
            prompt=name,
            ours=None if ours is None else len(ids_in(ours)),
            theirs=None if theirs is None else len(ids_in(theirs)),
            differs_at=None if ours is None or theirs is None else first_difference(ours, theirs),
            why=why,
        )


def ids_in(tokens: TokenBytes) -> array[int]:
    """View packed ids as numbers."""
    return array("I", tokens)


def first_difference(one: TokenBytes, other: TokenBytes) -> int | None:
    """Return the position of the first token that differs, None where all are equal."""
    pairs = enumerate(zip_longest(ids_in(one), ids_in(other)))
    return next((at for at, (left, right) in pairs if left != right), None)
