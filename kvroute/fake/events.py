"""What happens in a simulated cache, told as vLLM 0.32 tells it: map-form events in an array-form batch, in msgpack.

A batch is [time, events, rank]. `BlockStored` carries the token ids of its blocks, which the pool does not know: they
come from the sequences that are in the engine, found by the last block's hash, which stands for all before it.
Source of fields and order: vLLM's BlockStored, BlockRemoved and AllBlocksCleared (vllm/distributed/kv_events.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct, msgpack

from kvroute.fake.publisher import EventPublisher
from kvroute.kv.chain import TOKEN_BYTES, BlockHash, PrefixChain, TokenBytes, hashes_of
from kvroute.kv.pool import CacheEvent, Cleared, Stored
from kvroute.sim.replica import RequestId

RANK = 0
STEPS_KEPT = 2  # a sequence that left may still have events in the step under way, and in one that was scheduled ahead
LEFT_LIMIT = 8192  # sequences that left and are kept for that; those who come to a hung engine and leave are not


class Story(Struct, frozen=True, kw_only=True, eq=False):
    """What the events of one sequence say."""

    chain: PrefixChain
    tokens: TokenBytes  # prompt and answer
    cache_salt: str | None = None
    session: str | None = None
    reports_hits: bool = False  # blocks that it finds in the cache are told again (kv_cache_report_mode "full")


class EventFeed:
    """Turns what the engine reports after each step into one batch, and publishes it."""

    def __init__(self, publisher: EventPublisher, block_size: int) -> None:
        self.publisher = publisher
        self._block_size = block_size
        self._stories: dict[RequestId, Story] = {}
        self._at: dict[int, tuple[int, list[Story]]] = {}  # block hash -> its place in the chain, and who has it
        self._left: deque[tuple[int, RequestId]] = deque()  # with the step after which it may be forgotten
        self._again: list[tuple[Stored, Story]] = []  # to be told again with the step under way, of who found them
        self._steps = 0

    @property
    def known(self) -> int:
        """How many sequences are known."""
        return len(self._stories)

    def joined(self, request: RequestId, story: Story) -> None:
        """Learn what a sequence says, before it gets to the engine."""
        self._stories[request] = story
        for place, block_hash in enumerate(hashes_of(story.chain)):
            self._at.setdefault(block_hash, (place, []))[1].append(story)

    def admitted(self, request: RequestId, hit_blocks: int) -> None:
        """Learn how many blocks a sequence found in the cache."""
        story = self._stories[request]
        if story.reports_hits and hit_blocks:
            found = tuple(map(BlockHash, hashes_of(story.chain)[:hit_blocks]))
            self._again.append((Stored(found, None), story))

    def left(self, request: RequestId) -> None:
        """Learn that a sequence has ended, however."""
        if len(self._left) < LEFT_LIMIT:
            self._left.append((self._steps + STEPS_KEPT, request))
        else:
            self._forget(request)

    def stepped(self, events: Sequence[CacheEvent]) -> None:
        """Publish what a step changed, if anything."""
        told = [self._stored(event, story) for event, story in self._again]
        told += [event for event in map(self._told, events) if event]
        self._again.clear()
        if told:
            self.publisher.publish(msgpack.encode([time.time(), told, RANK]))
        self._steps += 1
        while self._left and self._left[0][0] <= self._steps:
            self._forget(self._left.popleft()[1])

    def _forget(self, request: RequestId) -> None:
        story = self._stories.pop(request)
        for block_hash in hashes_of(story.chain):
            _, holders = self._at[block_hash]
            holders.remove(story)
            if not holders:
                del self._at[block_hash]

    def _told(self, event: CacheEvent) -> dict[str, Any]:
        """Write one event; empty for blocks of a sequence that is not known any more, which nobody can tell."""
        if isinstance(event, Stored):
            _, holders = self._at.get(event.hashes[-1], (0, []))
            return self._stored(event, holders[0]) if holders else {}
        if isinstance(event, Cleared):
            return {"type": "AllBlocksCleared"}
        return {"type": "BlockRemoved", "block_hashes": [event.hash], "medium": event.medium, "group_idx": 0}

    def _stored(self, event: Stored, story: Story) -> dict[str, Any]:
        place, count = self._at[event.hashes[-1]][0], len(event.hashes)
        first = place + 1 - count
        width = self._block_size * TOKEN_BYTES
        ids = memoryview(story.tokens)[first * width : (place + 1) * width].cast("I").tolist()
        body = {
            "type": "BlockStored",
            "block_hashes": event.hashes,
            "parent_block_hash": event.parent,
            "token_ids": ids,
            "block_size": self._block_size,
            "lora_id": None,
            "medium": event.medium,
            "lora_name": None,
            "extra_keys": [_extra_keys(story, first + number) for number in range(count)],
            "group_idx": 0,
            "kv_cache_spec_kind": "full_attention",
        }
        return body | {"session_id": story.session} if story.session is not None else body


def _extra_keys(story: Story, place: int) -> list[str] | None:
    """Return what a block's hash covers beside tokens: the salt, in the first block of a chain."""
    return [story.cache_salt] if story.cache_salt is not None and place == 0 else None
