"""Prompts -> token ids and chains with the model's own files, on this machine.

Long new texts are tokenised on a small pool of threads, where the library leaves the interpreter lock to the event
loop; short ones, and long ones whose start is known, cost less than the way to the pool. Rendering stays on the loop:
it holds the lock wherever it runs.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from kvroute.adapters.approximate import estimate_tokens
from kvroute.adapters.known_texts import KnownTexts, Start, chain_from, remember_chain, whole_blocks
from kvroute.adapters.render import CannotRender, Renderer
from kvroute.adapters.tokenizer import SAMPLES, Tokenizer
from kvroute.kv.chain import HASH_BYTES, TOKEN_BYTES, PrefixChain, Root, TokenBytes, chain_of, extend
from kvroute.kv.prompt import ChatPrompt, Prompt, TextPrompt

INLINE_BYTES = {"fastokens": 16_384, "tokenizers": 1_024}  # of new text, about 300 microseconds
POOL_THREADS = 2
POOL_WAITING_MAX = 64  # beyond that the event loop does the work itself, which slows down whoever sends it
SAMPLE_TURNS = 3


class LocalTokens:
    """A model's renderer and tokenizer, and what they did before.

    Args:
        renderer: None where the engine renders chats in a way of its own.
        limit_bytes: memory for texts that were tokenised before.
    """

    def __init__(self, tokenizer: Tokenizer, renderer: Renderer | None, limit_bytes: int) -> None:
        self.tokenizer = tokenizer
        self.anchor = None if renderer is None else tokenizer.anchor_for(_sample_text(renderer))
        self.known = KnownTexts(self.anchor, limit_bytes)
        self._renderer = renderer
        self._inline_bytes = INLINE_BYTES[tokenizer.library]
        self._pool: ThreadPoolExecutor | None = None
        self._waiting = 0
        self._may_extend = _continues_plainly(tokenizer)

    def start(self) -> None:
        """Make the pool of threads; without it everything runs in place."""
        self._pool = ThreadPoolExecutor(POOL_THREADS, thread_name_prefix="tokens")

    def close(self) -> None:
        """End the threads, after what they are doing now."""
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)

    async def read(self, source: ChatPrompt | TextPrompt, block_size: int, root: Root) -> Prompt:
        """Return the prompt that the engine makes of a request.

        Raises:
            CannotRender: the text cannot be known here.
        """
        if isinstance(source, TextPrompt):
            ids, chain = await self._tokens(source.text, source.add_special_tokens, block_size, root)
            return Prompt(chain, len(ids) // TOKEN_BYTES, block_size, ids)
        if self._renderer is None:
            raise CannotRender("the engine renders this model's chats in a way of its own")
        rendered = self._renderer.render(source)
        if not rendered.is_whole:
            return await self._before_media(source, rendered.text, block_size, root)
        ids, chain = await self._tokens(rendered.text, source.add_special_tokens, block_size, root)
        return Prompt(chain, len(ids) // TOKEN_BYTES, block_size, ids)

    async def extend(self, prompt: Prompt, answer: str, completion_tokens: int, root: Root) -> PrefixChain | None:
        """Return the chain of a prompt and its answer as the engine's cache holds it, or None where it is not certain.

        The last sampled token was never fed back, so its KV does not exist. An end-of-turn token is counted by the
        engine and is not part of the text.
        """
        if not (prompt.exact and prompt.ids and self._may_extend):
            return None
        try:
            [added] = await self._encode([answer], len(answer))
        except CannotRender:
            return None
        if completion_tokens - len(added) // TOKEN_BYTES not in (0, 1):
            return None
        held_tokens = prompt.tokens + completion_tokens - 1
        ids = (prompt.ids + added)[: held_tokens * TOKEN_BYTES]
        done = len(prompt.chain) // HASH_BYTES * prompt.block_size * TOKEN_BYTES
        parent = int.from_bytes(prompt.chain[-HASH_BYTES:], "little") if prompt.chain else root
        return PrefixChain(prompt.chain + extend(parent, ids[done:], prompt.block_size))

    async def _before_media(self, chat: ChatPrompt, text: str, block_size: int, root: Root) -> Prompt:
        """Return a prompt whose chain ends at the last anchor before media: what comes behind may depend on it."""
        at = text.rfind(self.anchor) if self.anchor else 0
        ids, chain = await self._tokens(text[: max(at, 0)], chat.add_special_tokens, block_size, root)
        tokens = max(estimate_tokens(chat), len(ids) // TOKEN_BYTES + 1)
        return Prompt(chain, tokens, block_size, ids, exact=False)

    async def _tokens(self, text: str, special: bool, block_size: int, root: Root) -> tuple[TokenBytes, PrefixChain]:
        """Return a text's ids and chain, from a known start where there is one."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise CannotRender("the text holds half of a surrogate pair") from None
        before, after = self.tokenizer.surroundings if special else (b"", b"")
        if before or after:  # a chain from another first token shares nothing with the starts that are known
            [ids] = await self._encode([text], len(data))
            whole = TokenBytes(before + ids + after)
            return whole, chain_of(whole, block_size, root)
        at, start = self.known.find(data)
        cuts = self.known.cuts(data, at)
        edges = [at, *cuts, len(data)]
        parts = [data[a:b].decode() for a, b in pairwise(edges)]
        encoded = await self._encode(parts, len(data) - at)
        ids = TokenBytes(b"".join((start.ids, *encoded)))
        chain = chain_from(start, ids, block_size, root)
        self._remember(data, start, cuts, encoded, (block_size, root), ids, chain)
        return ids, chain

    def _remember(
        self,
        data: bytes,
        start: Start,
        cuts: list[int],
        encoded: list[bytes],
        chain_key: tuple[int, Root],
        ids: bytes,
        chain: bytes,
    ) -> None:
        end = len(start.ids)
        if end and chain_key not in start.chains:
            remember_chain(start, chain_key, whole_blocks(chain, start.ids, chain_key[0]))
        for cut, part in zip(cuts, encoded, strict=False):
            end += len(part)
            self.known.add(data, cut, ids[:end], chain_key, whole_blocks(chain, ids[:end], chain_key[0]))

    async def _encode(self, texts: list[str], size_bytes: int) -> list[bytes]:
        try:
            return await self._encode_somewhere(texts, size_bytes)
        except ValueError as error:  # half of a surrogate pair, or a library that gives up on a text
            raise CannotRender(f"the text cannot be tokenised: {error}") from error

    async def _encode_somewhere(self, texts: list[str], size_bytes: int) -> list[bytes]:
        if self._pool is None or size_bytes <= self._inline_bytes or self._waiting >= POOL_WAITING_MAX:
            return self.tokenizer.encode_parts(texts)
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, self.tokenizer.encode_parts, texts)
        finally:
            self._waiting -= 1


def _sample_text(renderer: Renderer) -> str:
    """Return a rendered conversation with a few turns, or nothing where the template takes none."""
    turns = [{"role": role, "content": "x"} for _ in range(SAMPLE_TURNS) for role in ("user", "assistant")]
    try:
        return renderer.render(ChatPrompt(messages=turns[:-1])).text
    except CannotRender:
        return ""


def _continues_plainly(tokenizer: Tokenizer) -> bool:
    """Return whether text in the middle has the same ids as text alone: nothing is put before a first piece."""
    for anchor in tokenizer.anchors[:1]:
        ends = [tokenizer.encode(anchor) + tokenizer.encode(text) for text in SAMPLES]
        return ends == tokenizer.encode_parts([anchor + text for text in SAMPLES])
    return False
