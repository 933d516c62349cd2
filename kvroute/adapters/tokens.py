"""What a request says -> the prompt that the engine will prefill: its tokens, and the chain that names its prefixes.

One reader per base model. It has up to three doors and takes the best that is open for a prompt:

- local: the model's own tokenizer and template, from files on this machine;
- replica: the engine's /tokenize, for chats that are not rendered through Jinja, or where there are no files;
- approximate: chunks of text, where nothing else answers. Never wrong in a way that matters, only less exact.

`mode` says which door chats take, `why` the reason in words for a log. A reader that opens locally compares itself with
a replica once, at its start, and steps back to the replica where they differ.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import Literal

import msgspec
from jinja2 import TemplateError

from kvroute.adapters.approximate import approximate
from kvroute.adapters.conversation import CannotRender
from kvroute.adapters.known_texts import EMPTY
from kvroute.adapters.local_tokens import LocalTokens
from kvroute.adapters.model_files import ModelFiles, find_model, read_model
from kvroute.adapters.render import Renderer
from kvroute.adapters.replica_tokens import Ask, CannotAsk, ReplicaTokens
from kvroute.adapters.tokenizer import SAMPLES, Tokenizer
from kvroute.errors import ConfigError
from kvroute.kv.chain import PrefixChain, Root, TokenBytes, grow, root_of
from kvroute.kv.prompt import ChatPrompt, Prompt, PromptSource, TextPrompt, TokenPrompt, WrittenChat

log = logging.getLogger("kvroute.tokens")

Mode = Literal["local", "replica", "approximate"]

LOCAL_LIMIT_BYTES = 64 << 20  # texts that were tokenised before
REPLICA_LIMIT_BYTES = 32 << 20  # whole prompts that a replica tokenised
BYTES_PER_TOKEN = 4  # of what cannot be read
WHOLE = 1 << 24  # a block size that no prompt fills: all of its tokens are in its tail
PROBE_TEXT = TextPrompt(" ".join(text for text in SAMPLES if text))
PROBE_CHAT = ChatPrompt(
    messages=[
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "Danke schön, 谢谢!"},
    ]
)


class PromptReader:
    """Turns prompts of one base model into chains. `open_reader` makes one."""

    def __init__(
        self, local: LocalTokens | None, replica: ReplicaTokens | None, *, mode: Mode, why: str, digest: str = ""
    ) -> None:
        self.mode: Mode = mode
        self.why = why
        self.approximated = 0  # prompts that became text chunks
        self._local = local
        self._replica = replica
        self._digest = digest

    @property
    def fingerprint(self) -> str:
        """What prompts of this reader share with prompts of other readers: part of the index's namespace."""
        return f"{self.mode}-{self._digest}" if self.mode == "local" else self.mode

    @property
    def cache_hits(self) -> int:
        """Prompts of which a start (local) or the whole (replica) was known."""
        return (self._local.hits if self._local else 0) + (self._replica.hits if self._replica else 0)

    @property
    def cache_misses(self) -> int:
        """Prompts that were wholly new."""
        return (self._local.misses if self._local else 0) + (self._replica.misses if self._replica else 0)

    @property
    def ask_failures(self) -> int:
        """Prompts about which a replica gave no usable answer."""
        return self._replica.failures if self._replica else 0

    async def start(self, *, compares: bool = True) -> None:
        """Make the threads, and compare with a replica what files say."""
        if self._local is not None:
            self._local.start()
            if compares and self._replica is not None:
                await self._verify(self._local, self._replica)

    async def close(self) -> None:
        """End the threads."""
        if self._local is not None:
            await asyncio.to_thread(self._local.close)

    async def read(self, source: PromptSource, *, block_size: int, root: Root) -> Prompt:
        """Return the prompt of a request. Never fails: what no door can read becomes text chunks."""
        if isinstance(source, WrittenChat):
            if self.mode == "local" and self._local is not None:
                prompt = await self._local.read_turns(source, block_size, root)
                if prompt is not None:
                    return prompt
            size_bytes = source.size_bytes
            try:
                source = source.decoded()
            except (msgspec.DecodeError, RecursionError):  # the engine says so itself
                self.approximated += 1
                return Prompt(PrefixChain(b""), size_bytes // BYTES_PER_TOKEN, block_size, exact=False)
        if isinstance(source, TokenPrompt):
            return _prompt(source.ids, block_size, root)
        local, replica = self._doors(source)
        try:
            if local is not None:
                return await local.read(source, block_size, root)
            if replica is not None:
                return _prompt(await replica.ids_of(source), block_size, root)
        except (CannotRender, CannotAsk):
            pass  # counted below; the engine says itself what is wrong with the request, if anything is
        except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError):
            log.warning("a prompt of an unforeseen shape is read as text", exc_info=True)
        self.approximated += 1
        return approximate(source, block_size, root)

    async def extend(self, prompt: Prompt, answer: str, completion_tokens: int, root: Root) -> PrefixChain | None:
        """Return the chain of a prompt and its generated answer as the engine's cache holds it after the answer.

        None where tokenising the answer does not give the number of tokens that the engine reported (an end-of-turn
        token may be among them), so that nothing false is claimed. Only for answers that are plain text.
        """
        return None if self._local is None else await self._local.extend(prompt, answer, completion_tokens, root)

    def _doors(self, source: ChatPrompt | TextPrompt) -> tuple[LocalTokens | None, ReplicaTokens | None]:
        if isinstance(source, TextPrompt):
            return self._local, self._replica
        own_template = source.chat_template is not None  # only engines with a flag take it; the replica knows
        return (self._local if self.mode == "local" and not own_template else None), self._replica

    async def _verify(self, local: LocalTokens, replica: ReplicaTokens) -> None:
        """Step back to the replica for what it tokenises otherwise."""
        for probe in (PROBE_TEXT, PROBE_CHAT):
            try:
                ours = (await local.read(probe, WHOLE, root_of(""))).tail
            except CannotRender:
                continue
            try:
                theirs = await replica.ids_of(probe)
            except CannotAsk as error:
                self.why += f" (not compared with a replica: {error})"
                return
            if ours != theirs:
                self.mode = "replica"
                self.why = f"{self.why}, but a replica tokenises otherwise"
                if probe is PROBE_TEXT:
                    self._local = None
                    await asyncio.to_thread(local.close)
                return


def _prompt(ids: TokenBytes, block_size: int, root: Root) -> Prompt:
    whole = grow(EMPTY, ids, block_size, root)
    return Prompt(whole.chain, whole.tokens, block_size, whole.tail)


async def open_reader(
    setting: str,
    model_root: str | None,
    model_name: str,
    ask: Ask | None,
    *,
    environ: Mapping[str, str] = os.environ,
) -> PromptReader:
    """Return the reader for a model; `start` it before use.

    Args:
        setting: "auto", "none" (text chunks), or a directory with a tokenizer.json.
        model_root: what a replica says the model was loaded from.
        model_name: the name that replicas serve the model under.
        ask: how to ask a replica of that model; None where none may be asked.
        environ: where the Hugging Face cache is told.

    Raises:
        ConfigError: the setting names a directory without a usable tokenizer.
    """
    if setting == "none":
        return PromptReader(None, None, mode="approximate", why="as configured")
    replica = None if ask is None else ReplicaTokens(model_name, ask, REPLICA_LIMIT_BYTES)
    directory, why = find_model(setting, model_root, model_name, environ)
    if directory is not None:
        try:
            files = await asyncio.to_thread(read_model, directory)
            local, elsewhere = await asyncio.to_thread(_open_files, files)
            mode: Mode = "local" if elsewhere is None else "replica" if replica else "approximate"
            return PromptReader(
                local,
                replica,
                mode=mode,
                why=why if elsewhere is None else f"{why}, but {elsewhere}",
                digest=files.digest,
            )
        except ConfigError as error:
            if setting != "auto":
                raise
            why = str(error)
    return PromptReader(None, replica, mode="replica" if replica else "approximate", why=why)


def _open_files(files: ModelFiles) -> tuple[LocalTokens, str | None]:
    """Load a model's files; the second value says why its chats cannot be rendered with them, if so."""
    tokenizer = Tokenizer(files)
    elsewhere = files.why_elsewhere
    renderer = None
    if elsewhere is None and not files.templates:
        elsewhere = "its files hold no chat template"
    if elsewhere is None:
        try:
            renderer = Renderer(files.templates, files.variables)
        except TemplateError as error:
            elsewhere = f"its chat template does not compile ({error})"
    return LocalTokens(tokenizer, renderer, LOCAL_LIMIT_BYTES), elsewhere
