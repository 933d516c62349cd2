"""Prompts -> token ids and chains with the model's own files, on this machine.

Long new texts are tokenised on a small pool of threads, where the library leaves the interpreter lock to the event
loop; short ones, and long ones whose start is known, cost less than the way to the pool. Rendering stays on the loop:
it holds the lock wherever it runs.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import msgspec

from kvroute.adapters.approximate import estimate_tokens
from kvroute.adapters.known_texts import EMPTY, KnownTexts
from kvroute.adapters.known_turns import KnownTurns
from kvroute.adapters.render import CannotRender, Renderer
from kvroute.adapters.tokenizer import SAMPLES, Tokenizer
from kvroute.kv.chain import TOKEN_BYTES, Grown, PrefixChain, Root, grow
from kvroute.kv.prompt import ChatPrompt, Prompt, TextPrompt, WrittenChat

INLINE_S = 300e-6  # of tokenising that the event loop does itself: the way to the pool and back costs as much
INLINE_BYTES_MAX = 48 << 10  # however quick the last texts were: the next one may be in words never seen
BYTE_S = {"fastokens": 18e-9, "tokenizers": 300e-9}  # a first guess of seconds a byte, until texts have told
PACE_BYTES_MIN = 1_024  # shorter texts say little about the pace
SLOWER, FASTER = 0.5, 0.05  # weights of an observation: a slow text is believed sooner than a quick one
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
        turns = None if renderer is None else KnownTurns(renderer, tokenizer, limit_bytes // 2)
        self.turns = turns if turns is not None and turns.anchors else None
        self.known = KnownTexts(self.anchor, limit_bytes if self.turns is None else limit_bytes // 2)
        self._renderer = renderer
        self._byte_s = BYTE_S[tokenizer.library]
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
            whole = await self._grown(source.text, source.add_special_tokens, block_size, root)
            return Prompt(whole.chain, whole.tokens, block_size, whole.tail)
        if self._renderer is None:
            raise CannotRender("the engine renders this model's chats in a way of its own")
        rendered = self._renderer.render(source)
        if not rendered.is_whole:
            return await self._before_media(source, rendered.text, block_size, root)
        whole = await self._grown(rendered.text, source.add_special_tokens, block_size, root)
        return Prompt(whole.chain, whole.tokens, block_size, whole.tail)

    async def read_turns(self, chat: WrittenChat, block_size: int, root: Root) -> Prompt | None:
        """Return the prompt of a chat by what is new in it; None where it has to be decoded and read whole."""
        try:
            unread = self.turns.find(chat, block_size, root) if self.turns is not None else None
            if unread is None or self.turns is None:
                return None
            size_bytes = sum([len(text.encode()) for text in unread.texts])
            if self._is_short(size_bytes):  # or nothing
                encoded = self._encode_now(unread.texts, size_bytes)
            else:
                encoded = await self._encode(unread.texts, size_bytes)
        except (CannotRender, msgspec.DecodeError, ValueError, RecursionError):  # the other way says what is wrong
            return None
        grown = unread.start
        for boundary, ids in zip(unread.boundaries, encoded, strict=False):  # none where everything is known
            grown = grow(grown, ids, block_size, root)
            self.turns.add(boundary, grown)
        whole = grow(grown, unread.foot_ids, block_size, root)
        return Prompt(whole.chain, whole.tokens, block_size, whole.tail)

    async def extend(self, prompt: Prompt, answer: str, completion_tokens: int, root: Root) -> PrefixChain | None:
        """Return the chain of a prompt and its answer as the engine's cache holds it, or None where it is not certain.

        The last sampled token was never fed back, so its KV does not exist. An end-of-turn token is counted by the
        engine and is not part of the text.
        """
        if not (prompt.exact and self._may_extend):
            return None
        try:
            [added] = await self._encode([answer], len(answer))
        except CannotRender:
            return None
        if completion_tokens - len(added) // TOKEN_BYTES not in (0, 1):
            return None
        held_tokens = completion_tokens - 1  # of the answer
        start = Grown(prompt.chain, prompt.tail, prompt.tokens)
        return grow(start, added[: held_tokens * TOKEN_BYTES], prompt.block_size, root).chain

    @property
    def hits(self) -> int:
        """Prompts of which a start was known."""
        return self.known.hits + (self.turns.hits if self.turns else 0)

    @property
    def misses(self) -> int:
        """Prompts that were wholly new."""
        return self.known.misses + (self.turns.misses if self.turns else 0)

    async def _before_media(self, chat: ChatPrompt, text: str, block_size: int, root: Root) -> Prompt:
        """Return a prompt whose chain ends at the last anchor before media: what comes behind may depend on it."""
        at = text.rfind(self.anchor) if self.anchor else 0
        start = await self._grown(text[: max(at, 0)], chat.add_special_tokens, block_size, root)
        tokens = max(estimate_tokens(chat), start.tokens + 1)
        return Prompt(start.chain, tokens, block_size, start.tail, exact=False)

    async def _grown(self, text: str, special: bool, block_size: int, root: Root) -> Grown:
        """Return a text's tokens as a chain and its tail, going on from a known start where there is one."""
        try:
            data = text.encode()
        except UnicodeEncodeError:
            raise CannotRender("the text holds half of a surrogate pair") from None
        before, after = self.tokenizer.surroundings if special else (b"", b"")
        if before or after:  # a chain from another first token shares nothing with the starts that are known
            [ids] = await self._encode([text], len(data))
            return grow(EMPTY, before + ids + after, block_size, root)
        chain_key = (block_size, root)
        at, grown = self.known.find(data, chain_key)
        cuts = self.known.cuts(data, at)
        parts = [data[a:b].decode() for a, b in pairwise((at, *cuts, len(data)))]
        encoded = await self._encode(parts, len(data) - at)
        for cut, ids in zip(cuts, encoded, strict=False):  # the part behind the last cut comes below
            grown = grow(grown, ids, block_size, root)
            self.known.add(data, cut, chain_key, grown)
        return grow(grown, encoded[-1], block_size, root)

    async def _encode(self, texts: list[str], size_bytes: int) -> list[bytes]:
        try:
            if self._pool is None or self._is_short(size_bytes) or self._waiting >= POOL_WAITING_MAX:
                return self._encode_now(texts, size_bytes)
            return await self._encode_in(self._pool, texts, size_bytes)
        except ValueError as error:  # half of a surrogate pair, or a library that gives up on a text
            raise CannotRender(f"the text cannot be tokenised: {error}") from error

    def _is_short(self, size_bytes: int) -> bool:
        return size_bytes <= INLINE_BYTES_MAX and size_bytes * self._byte_s <= INLINE_S

    def _encode_now(self, texts: list[str], size_bytes: int) -> list[bytes]:
        """Encode in this thread, and learn the pace from it."""
        if size_bytes < PACE_BYTES_MIN:
            return self.tokenizer.encode_parts(texts)
        start_s = time.thread_time()
        encoded = self.tokenizer.encode_parts(texts)
        change_s = (time.thread_time() - start_s) / size_bytes - self._byte_s
        self._byte_s += (SLOWER if change_s > 0 else FASTER) * change_s
        return encoded

    async def _encode_in(self, pool: ThreadPoolExecutor, texts: list[str], size_bytes: int) -> list[bytes]:
        self._waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(pool, self._encode_now, texts, size_bytes)
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
