"""From a checked request to sequences of the simulated engine, and from its progress back to text."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import count

from msgspec import Struct

from kvroute.fake import text
from kvroute.fake.driver import Driver, Job, Progress
from kvroute.fake.events import Story
from kvroute.fake.openai import Choice, Count
from kvroute.fake.requests import Ask, Model
from kvroute.kv.chain import TOKEN_BYTES, Root, TokenBytes, chain_of, root_of
from kvroute.sim.replica import RequestId, SimRequest


class Script(Struct, frozen=True):
    """What one sequence will say."""

    prompt: TokenBytes
    ids: TokenBytes
    finish_reason: str  # "stop" where it ends its turn, "length" where it is cut off

    def said(self, first: int, last: int) -> tuple[list[int], str]:
        """Return the ids and the text of some of its tokens; the end-of-turn token has no text."""
        ids = list(text.ids_of(self.ids)[first:last])
        return ids, "".join(text.piece_of(token) for token in ids if token != text.END_OF_TURN)


def engine_root(model: str, salt: str | None) -> Root:
    """Return the seed of this engine's block hashes: like a real engine's, they equal no router's own."""
    return root_of(f"{model} inside an engine", None, salt)


class Studio:
    """Writes scripts and has the engine perform them."""

    def __init__(self, driver: Driver, model: Model, seed: int) -> None:
        self._driver = driver
        self._model = model
        self._seed = seed
        self._numbers = count()

    def begin(self, ask: Ask) -> Performance:
        """Start generating what a request asks for.

        Raises:
            EngineBusy: the queue is full.
        """
        scripts = [self._script(ask, prompt, index) for prompt in ask.prompts for index in range(ask.n)]
        requests = [self._request(script, ask.cache_salt) for script in scripts]
        stories = [
            Story(
                chain=request.chain,
                tokens=TokenBytes(script.prompt + script.ids),
                cache_salt=ask.cache_salt,
                session=ask.session,
                reports_hits=ask.reports_hits,
            )
            for request, script in zip(requests, scripts, strict=True)
        ]
        job = self._driver.submit(requests, stories)
        return Performance(ask, scripts, job, self._driver.replica.pool.block_size)

    def _script(self, ask: Ask, prompt: TokenBytes, index: int) -> Script:
        left = self._model.max_model_len - len(prompt) // TOKEN_BYTES
        bound = left if ask.max_tokens is None else min(left, ask.max_tokens)
        ids = text.answer(
            prompt, seed=self._seed, index=index, max_tokens=bound, min_tokens=ask.min_tokens, endless=ask.is_endless
        )
        ends_turn = text.ids_of(ids)[-1] == text.END_OF_TURN
        return Script(prompt, ids, "stop" if ends_turn else "length")

    def _request(self, script: Script, salt: str | None) -> SimRequest:
        ids = TokenBytes(script.prompt + script.ids)
        chain = chain_of(ids, self._driver.replica.pool.block_size, engine_root(self._model.name, salt))
        prompt_tokens = len(script.prompt) // TOKEN_BYTES
        return SimRequest(
            RequestId(f"seq-{next(self._numbers)}"), chain, prompt_tokens, len(ids) // TOKEN_BYTES - prompt_tokens
        )


class Performance:
    """The answers to one request while they are generated."""

    def __init__(self, ask: Ask, scripts: list[Script], job: Job, block_size: int) -> None:
        self.ask = ask
        self.job = job
        self._scripts = scripts
        self._block_size = block_size
        self._given = [0] * len(scripts)  # tokens of each choice that were handed to the client

    async def deltas(self) -> AsyncIterator[list[Choice]]:
        """Yield what was generated since the last time, choice by choice, until all have ended."""
        ended: set[int] = set()
        while len(ended) < len(self._scripts):
            await self.job.changed()
            batch = []
            for index, sequence in enumerate(self.job.sequences):
                if index not in ended and (sequence.is_done or sequence.produced_tokens > self._given[index]):
                    batch.append(self._delta(index, sequence))
                    if sequence.is_done:
                        ended.add(index)
            if batch:
                yield batch

    def whole(self) -> list[Choice]:
        """Return all answers from their beginning."""
        self._given = [0] * len(self._scripts)
        return [self._delta(index, sequence) for index, sequence in enumerate(self.job.sequences)]

    def prompt_ids(self, index: int) -> list[int] | None:
        """Return a choice's prompt as token ids, where the client asked for them."""
        return list(text.ids_of(self._scripts[index].prompt)) if self.ask.return_token_ids else None

    def running_count(self, index: int) -> Count | None:
        """Return the counts of one choice so far, where the client asked for continuous usage."""
        if not self.ask.continuous_usage:
            return None
        return Count(len(self._scripts[index].prompt) // TOKEN_BYTES, self._given[index], 0, None)

    def count(self) -> Count:
        """Return the counts of the whole request. A prompt counts once, however many answers it has.

        Hits are those of one sequence, as at vLLM: of the one that was heard first in a stream, else of the last one;
        of several answers to a prompt that is one that hits what the first has stored. Only chats tell what is new.
        """
        produced = sum(sequence.produced_tokens for sequence in self.job.sequences)
        at = 0 if self.ask.is_stream else -1
        cached, created = self.job.sequences[at].cached_tokens, None
        if self.ask.is_chat:
            full = len(self.ask.prompts[at]) // TOKEN_BYTES // self._block_size * self._block_size
            created = max(0, full - cached)
        return Count(self.ask.prompt_tokens, produced, cached, created)

    def _delta(self, index: int, sequence: Progress) -> Choice:
        first, last = self._given[index], sequence.produced_tokens
        ids, said = self._scripts[index].said(first, last)
        self._given[index] = last
        reason = self._scripts[index].finish_reason if sequence.is_done else None
        return Choice(
            index,
            said,
            token_ids=ids if self.ask.return_token_ids else None,
            finish_reason="abort" if sequence.is_aborted else reason,
            prompt_ids=self.prompt_ids(index) if not first else None,
        )
