"""Tells the index about the blocks that an engine generated: the next turn of a conversation begins with them.

The answer's text is tokenised again behind the prompt, after the client has its answer. The reader claims nothing where
the count differs from the engine's. A bounded number of answers waits for this; more are let go, which costs a hit.
"""

from __future__ import annotations

import asyncio
import logging

from kvroute.adapters.index import Index
from kvroute.adapters.tokens import PromptReader
from kvroute.kv.chain import Root
from kvroute.kv.prompt import Prompt
from kvroute.proxy import answer as answers
from kvroute.proxy.relay import Delivery
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.replica import ReplicaId

log = logging.getLogger("kvroute.learn")

PENDING_MAX = 256


class Learner:
    """Owns the tasks that read answers."""

    def __init__(self, index: Index, stats: HandlerStats) -> None:
        self._index = index
        self._stats = stats
        self._pending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Let go of what is pending."""
        for task in self._pending:
            task.cancel()
        await asyncio.gather(*self._pending, return_exceptions=True)

    async def settled(self) -> None:
        """Wait until everything that was pending is learnt."""
        await asyncio.gather(*self._pending)

    def learn(self, replica: ReplicaId, reader: PromptReader, prompt: Prompt, root: Root, delivery: Delivery) -> None:
        """Take an answer in, if there is room."""
        if delivery.usage is None or not prompt.exact or not (delivery.events or delivery.text):
            return
        if len(self._pending) >= PENDING_MAX:
            self._stats.answers_not_learnt += 1
            return
        task = asyncio.get_running_loop().create_task(self._learn(replica, reader, prompt, root, delivery))
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)

    async def _learn(
        self, replica: ReplicaId, reader: PromptReader, prompt: Prompt, root: Root, delivery: Delivery
    ) -> None:
        text = delivery.text or answers.text_of_events(delivery.events)
        chain = None
        try:
            if text and delivery.usage is not None:
                chain = await reader.extend(prompt, text, delivery.usage.completion_tokens, root)
        except Exception:
            log.exception("an answer could not be read; the index does not learn from it")
        if chain is None:
            self._stats.answers_not_learnt += 1
            return
        self._stats.answers_learnt += 1
        self._index.record(replica, chain)
