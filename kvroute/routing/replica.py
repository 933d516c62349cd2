"""A replica: who it is, and what it last said about itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NewType

from msgspec import Struct

ReplicaId = NewType("ReplicaId", str)  # its URL, and "#rank" where one URL serves several data-parallel ranks
Holding = Mapping[ReplicaId, int]  # leading blocks of a chain held by each replica; absent means none


class ModelCard(Struct, frozen=True):
    """One entry of a replica's /v1/models."""

    name: str
    max_model_len: int | None = None  # tokens, prompt and answer together
    root: str | None = None  # directory or hub name of the weights; an adapter's path
    parent: str | None = None  # the base model's name, where this is a LoRA adapter


class Replica(Struct, frozen=True, kw_only=True):
    """One vLLM engine that can be addressed: a URL and, under data parallelism, a rank."""

    id: ReplicaId
    url: str  # scheme, host, port; no trailing slash
    rank: int | None = None  # value of X-data-parallel-rank; None where the URL has a single engine
    cards: tuple[ModelCard, ...] = ()
    block_size: int | None = None  # tokens per KV block, None until it was learnt
    capacity_tokens: int | None = None  # tokens that its KV cache holds, None until it was learnt
    max_num_seqs: int | None = None  # sequences it runs at once, None = not known

    def card(self, model: str) -> ModelCard | None:
        """Return the card of a model or adapter that this replica serves."""
        return next((card for card in self.cards if card.name == model), None)

    @property
    def usable_tokens(self) -> int | None:
        """What of its KV cache one prompt can have: vLLM never hands out the first block. None = not known."""
        return max(self.capacity_tokens - (self.block_size or 0), 0) if self.capacity_tokens else None


class Load(Struct, frozen=True):
    """What a replica's metrics said, and when. Gauges lag by seconds and stand still while the engine is idle."""

    running: int = 0
    waiting: int = 0
    kv_used_fraction: float = 0.0  # 0..1, blocks of running requests only
    preemptions: int = 0  # since the engine started
    prefix_queries: int = 0  # tokens, since the engine started
    prefix_hits: int = 0  # tokens, since the engine started
    prompt_tokens: int = 0  # since the engine started
    generation_tokens: int = 0  # since the engine started
    at_s: float = 0.0  # router's clock when the report was read
