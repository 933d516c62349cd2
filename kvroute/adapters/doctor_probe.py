"""The hash probe: a prompt that nobody sent before, sent twice to one engine. What does the second one find?

The prompt is a chat, as clients send them. It begins with a fresh random text, so that the first one can find at most
what the model's template writes before it. The engine is asked for one token of an answer.
"""

from __future__ import annotations

import secrets
from time import monotonic

import msgspec
from msgspec import Struct

from kvroute.adapters.doctor_tokens import Tokens
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.errors import ReplicaFailed
from kvroute.kv.chain import TOKEN_BYTES, TokenBytes, chain_of, root_of
from kvroute.kv.prompt import ChatPrompt, Prompt
from kvroute.routing.findings import ProbeFacts

BLOCKS = 4  # that the prompt fills at least
BLOCK_SIZE_UNKNOWN = 16
WORDS_PER_TOKEN = 0.5  # a word of hexadecimal digits is several tokens: half a word a token is plenty
TRIES_MAX = 3  # at making the prompt long enough
REASON_CHARS = 200  # of an engine's refusal


class _Details(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int
    prompt_tokens_details: _Details | None = None


class _Answer(Struct):
    usage: _Usage


class Reading(Struct, frozen=True):
    """What one answer said."""

    prompt_tokens: int
    cached_tokens: int | None
    took_s: float


class ProbeFailed(Exception):
    """The prompt was not answered; the message says why."""


class Prober:
    """Probes the engines behind one URL."""

    def __init__(self, client: ReplicaClient, tokens: Tokens, model: str, max_model_len: int | None) -> None:
        self._client = client
        self._tokens = tokens
        self._model = model
        self._max_model_len = max_model_len

    async def probe(self, engine: int, rank: int | None, block_size: int | None) -> ProbeFacts:
        """Send a prompt twice.

        Args:
            engine: whose facts these are.
            rank: the data-parallel rank to ask, None where there is one engine.
            block_size: tokens per block, as far as it is known.
        """
        size = block_size or BLOCK_SIZE_UNKNOWN
        chat, ids = await self._chat(size)
        try:
            first = await self._send(chat, rank)
            before = await self._hits(engine)
            second = await self._send(chat, rank)
            after = await self._hits(engine)
        except ProbeFailed as error:
            return ProbeFacts(engine=engine, trouble=str(error))
        return ProbeFacts(
            engine=engine,
            expected_tokens=None if ids is None else len(ids) // TOKEN_BYTES,
            prompt_tokens=second.prompt_tokens,
            predicted_tokens=_reusable(ids, second.prompt_tokens, size),
            cached_tokens=(first.cached_tokens, second.cached_tokens),
            counted_hits=None if before is None or after is None else max(0, after - before),
            took_s=(first.took_s, second.took_s),
        )

    async def _chat(self, block_size: int) -> tuple[ChatPrompt, TokenBytes | None]:
        """Return a chat that fills enough blocks, and its tokens where somebody can make them."""
        wanted = BLOCKS * block_size + 1
        if self._max_model_len is not None:
            wanted = min(wanted, self._max_model_len * 3 // 4)
        words = max(8, int(wanted * WORDS_PER_TOKEN))
        for _ in range(TRIES_MAX):
            chat = ChatPrompt(messages=[{"role": "user", "content": _nonsense(words)}])
            ids = await self._tokens.best(chat)
            if ids is None or len(ids) // TOKEN_BYTES >= wanted:
                break
            words = words * wanted * TOKEN_BYTES // len(ids) + 8
        return chat, ids

    async def _send(self, chat: ChatPrompt, rank: int | None) -> Reading:
        body = {"model": self._model, "messages": chat.messages, "max_tokens": 1, "temperature": 0}
        headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
        start_s = monotonic()
        try:
            answer = await self._client.answered(
                "POST", "/v1/chat/completions", body=msgspec.json.encode(body), headers=headers
            )
        except ReplicaFailed as error:
            raise ProbeFailed(error.message) from None
        took_s = monotonic() - start_s
        if answer.status != 200:
            said = answer.body[:REASON_CHARS].decode("utf-8", "replace")
            raise ProbeFailed(f"/v1/chat/completions answered {answer.status}: {said}")
        try:
            usage = msgspec.json.decode(answer.body, type=_Answer).usage
        except msgspec.MsgspecError as error:
            raise ProbeFailed(f"the answer has no usage: {error}") from None
        details = usage.prompt_tokens_details
        return Reading(usage.prompt_tokens, details.cached_tokens if details else None, took_s)

    async def _hits(self, engine: int) -> int | None:
        """Return how many tokens of prompts an engine has taken from its cache so far."""
        try:
            page = await self._client.page(0.0)
        except ReplicaFailed:
            return None
        return next((one.load.prefix_hits for one in page.engines if one.engine == engine), None)


def _reusable(ids: TokenBytes | None, prompt_tokens: int, block_size: int) -> int:
    """Return what the router predicts for a prompt all of whose blocks are held; without ids its length tells."""
    if ids is None:
        return max(0, prompt_tokens - 1) // block_size * block_size
    prompt = Prompt(chain_of(ids, block_size, root_of("")), len(ids) // TOKEN_BYTES, block_size)
    return prompt.hit_limit_blocks * block_size


def _nonsense(words: int) -> str:
    return " ".join(secrets.token_hex(3) for _ in range(words))
