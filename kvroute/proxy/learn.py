"""Tells the index about the blocks that an engine generated: the next turn of a conversation begins with them.

The answer's text is tokenised again behind the prompt, after the client has its answer, and only where it completes a
block. The reader claims nothing where the count differs from the engine's. Answers wait in a bounded queue for one
task; more are let go, which costs a hit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque

from msgspec import Struct

from kvroute.adapters.index import Index
from kvroute.adapters.tokens import PromptReader
from kvroute.kv.chain import TOKEN_BYTES, Root
from kvroute.kv.prompt import Prompt
from kvroute.proxy import answer as answers
from kvroute.proxy.relay import Delivery
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.demand import Usage
from kvroute.routing.replica import ReplicaId

log = logging.getLogger("kvroute.learn")

PENDING_MAX = 256
TURN_ANSWERS = 8  # read one after another before requests have their turn; together they are one write to Redis


class _Lesson(Struct, frozen=True):
    """An answer that waits to be read."""

    replica: ReplicaId
    reader: PromptReader
    prompt: Prompt
    root: Root
    delivery: Delivery
    usage: Usage


class Learner:
    """Owns the task that reads answers."""

    def __init__(self, index: Index, stats: HandlerStats) -> None:
        self._index = index
        self._stats = stats
        self._waiting: deque[_Lesson] = deque()
        self._came = asyncio.Event()
        self._is_idle = asyncio.Event()
        self._is_idle.set()
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to read what is waiting."""
        self._task = asyncio.get_running_loop().create_task(self._read_all(), name="kvroute-learn")

    async def close(self) -> None:
        """Let go of what is waiting."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def settled(self) -> None:
        """Wait until everything that was waiting is learnt."""
        await self._is_idle.wait()

    def learn(self, replica: ReplicaId, reader: PromptReader, prompt: Prompt, root: Root, delivery: Delivery) -> None:
        """Take an answer in, if there is something to learn from it, and room."""
        usage = delivery.usage
        if usage is None or not (delivery.events or delivery.text) or not completes_block(prompt, usage):
            return
        if len(self._waiting) >= PENDING_MAX:
            self._stats.answers_not_learnt += 1
            return
        self._waiting.append(_Lesson(replica, reader, prompt, root, delivery, usage))
        if len(self._waiting) == 1:
            self._is_idle.clear()
            self._came.set()

    async def _read_all(self) -> None:
        waiting = self._waiting
        while True:
            if not waiting:
                self._is_idle.set()
                await self._came.wait()
                self._came.clear()
            for _ in range(min(TURN_ANSWERS, len(waiting))):
                await self._read(waiting.popleft())
            if waiting:
                await asyncio.sleep(0)

    async def _read(self, lesson: _Lesson) -> None:
        chain, delivery = None, lesson.delivery
        try:
            if text := delivery.text or answers.text_of_events(delivery.events):
                chain = await lesson.reader.extend(lesson.prompt, text, lesson.usage.completion_tokens, lesson.root)
        except Exception:
            log.exception("an answer could not be read; the index does not learn from it")
        if chain is None:
            self._stats.answers_not_learnt += 1
            return
        self._stats.answers_learnt += 1
        self._index.answered(lesson.replica, chain)


def completes_block(prompt: Prompt, usage: Usage) -> bool:
    """Say whether the cache holds more whole blocks after an answer than after its prompt.

    The last sampled token does not count: it was never fed back, so the cache has nothing of it.
    """
    return prompt.exact and len(prompt.tail) // TOKEN_BYTES + usage.completion_tokens - 1 >= prompt.block_size
