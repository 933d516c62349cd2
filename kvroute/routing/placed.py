"""What a router knows of caches when nobody tells it: the prefixes that it sent to each replica.

Routers without cache events keep such a record, each with its own rule of forgetting: so many tokens a replica, least
recently used first, or so many seconds. Neither is what the engine does, which is the point of having it here: it shows
what a rule gave with the knowledge that its authors had.

Blocks of a chain are used tail first, so its head is the last to go, as in vLLM. `LlmdPrefixes` is the record of llm-d,
which does neither that nor insist on unbroken matches.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from math import inf

from kvroute.kv.chain import hashes_of
from kvroute.routing.demand import Demand
from kvroute.routing.replica import ReplicaId

REPLICAS_MAX = 4096
BLOCKS_MAX = 1 << 20  # of one replica, whatever the rule allows: 16 million tokens in blocks of 16


class PlacedPrefixes:
    """Per replica: block hashes in the order of their last use. Bounded in replicas and in blocks of each."""

    def __init__(self, limit_tokens: float = inf, life_s: float = inf) -> None:
        self._limit_tokens = limit_tokens
        self._life_s = life_s
        self._blocks: OrderedDict[ReplicaId, OrderedDict[int, float]] = OrderedDict()

    def looked_at(self, demand: Demand) -> int:
        """Return how many tokens of a prompt are compared at all."""
        return demand.prompt_tokens

    def hit_tokens(self, replica: ReplicaId, demand: Demand, now_s: float) -> int:
        """Return how many leading prompt tokens were sent there before and are not forgotten."""
        blocks = self._blocks.get(replica)
        if not blocks:
            return 0
        self._expire(blocks, now_s)
        count = 0
        for block in hashes_of(demand.chain):
            if block not in blocks:
                break
            count += 1
        return count * demand.block_size

    def add(self, replica: ReplicaId, demand: Demand, now_s: float) -> None:
        """Note that a prompt was sent to a replica."""
        blocks = self._blocks.setdefault(replica, OrderedDict())
        self._blocks.move_to_end(replica)
        if len(self._blocks) > REPLICAS_MAX:
            self._blocks.popitem(last=False)
        for block in self._in_order_of_use(demand):
            blocks[block] = now_s
            blocks.move_to_end(block)
        self._expire(blocks, now_s)
        limit = min(self._limit_tokens / demand.block_size, BLOCKS_MAX)
        while len(blocks) > limit:
            blocks.popitem(last=False)

    def _in_order_of_use(self, demand: Demand) -> Sequence[int]:
        return hashes_of(demand.chain)[::-1]

    def _expire(self, blocks: OrderedDict[int, float], now_s: float) -> None:
        while blocks and next(iter(blocks.values())) + self._life_s < now_s:
            blocks.popitem(last=False)


class LlmdPrefixes(PlacedPrefixes):
    """What llm-d's router keeps where it hears no events (approximate prefix cache, `plugin.go` and `indexer.go`).

    Only so much of a prompt is kept and compared: prompts that differ behind it are the same to it. The head of a chain
    is the first to be forgotten. A block counts for a replica that has it, whether or not that has those before it, up
    to the first block that no replica has. `limit_tokens` is its number of blocks times their size.
    """

    def __init__(self, limit_tokens: float, match_tokens: int) -> None:
        super().__init__(limit_tokens)
        self._match_tokens = match_tokens

    def looked_at(self, demand: Demand) -> int:
        """Return how many tokens of a prompt are compared at all."""
        return min(demand.prompt_tokens, self._match_tokens)

    def hit_tokens(self, replica: ReplicaId, demand: Demand, now_s: float) -> int:
        """Return how many tokens of the prompt's beginning it takes to be there."""
        mine = self._blocks.get(replica)
        if not mine:
            return 0
        records, count = self._blocks.values(), 0
        for block in self._in_order_of_use(demand):
            if block in mine:
                count += 1
            elif not any(block in blocks for blocks in records):
                break
        return count * demand.block_size

    def _in_order_of_use(self, demand: Demand) -> Sequence[int]:
        return hashes_of(demand.chain)[: self._match_tokens // demand.block_size]
