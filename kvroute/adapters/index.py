"""The index: which replica holds which leading blocks.

`Index` is the contract; tests/contracts/test_index.py holds every implementation to it. `MemoryIndex` is the one for
simulations, tests, `--index memory`, and the local shadow that answers while Redis does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NewType, Protocol

from msgspec import Struct

from kvroute.kv.chain import PrefixChain
from kvroute.routing.replica import Holding, ReplicaId

Namespace = NewType("Namespace", str)  # model, block size, tokenizer fingerprint and hash version, see `namespace_of`


class Match(Struct, frozen=True):
    """What the index knows about the chains of one request."""

    holdings: tuple[Holding, ...]  # one per chain, in order; leading blocks by replica
    source: Literal["index", "local"]  # "local": the shared index was late or down, the router's own shadow answered


class Index(Protocol):
    """Who holds what. Writes are queued and never fail the caller; `match` never raises and has a deadline."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def join(self, replica: ReplicaId, namespace: Namespace, capacity_blocks: int) -> None:
        """Admit a replica, empty, or change its capacity. Joining again with other values starts a new generation."""

    def leave(self, replica: ReplicaId) -> None:
        """Forget a replica and all that it held; late writes of its old life change nothing."""

    async def match(self, namespace: Namespace, chains: Sequence[PrefixChain]) -> Match:
        """Return the holdings of every chain, in one round trip."""

    def record(self, replica: ReplicaId, chain: PrefixChain) -> None:
        """Note that the replica computes, and from now on holds, all blocks of the chain."""

    def correct(self, replica: ReplicaId, chain: PrefixChain, held_blocks: int) -> None:
        """Note that the replica turned out to hold only the first `held_blocks` blocks of the chain."""
