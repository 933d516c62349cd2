"""What a request asks of a replica, what it came to, and what was promised to a replica meanwhile. Values only."""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from kvroute.kv.chain import PrefixChain


class Demand(Struct, frozen=True, kw_only=True):
    """A request as routing sees it. Several prompts, or `n` answers, are one demand: they go to one replica."""

    model: str
    prompt_tokens: int  # summed over its prompts
    longest_prompt: int  # tokens of the longest one: this is what context length and capacity are compared with
    sequences: int = 1  # prompts x n
    output_tokens: int | None = None  # the client's bound for each answer, None where it gave none
    tenant: str = "default"
    exact: bool = True  # False: lengths are estimates, so nothing is refused because of them
    priority: int = 0  # higher goes first where requests are held
    streamed: bool = True  # False: the first byte comes with the last, and says nothing about the prefill
    chain: PrefixChain = PrefixChain(b"")  # of its only prompt; empty where there are several, or none was understood
    block_size: int = 16  # tokens of the chain's blocks


class Prefix(Struct, frozen=True):
    """The beginning of a prompt that other requests have as well: a replica that runs several of them holds it once."""

    hash: int  # of its last block
    tokens: int
    parent: Prefix | None = None  # a shorter one that it begins with, which still others have


class Promise(Struct, frozen=True):
    """What a replica was promised and has not finished: the ledger's row. Absolute figures, never deltas."""

    requests: int = 0
    prefill_tokens: int = 0  # prompt tokens to compute, of requests that have not sent a byte yet
    kv_tokens: int = 0  # tokens that will lie in the cache when the requests end, hits counted too

    def __add__(self, other: Promise) -> Promise:
        return Promise(
            self.requests + other.requests,
            self.prefill_tokens + other.prefill_tokens,
            self.kv_tokens + other.kv_tokens,
        )


class Outcome(Enum):
    """How a lease ended."""

    DONE = "done"  # the replica answered, in full
    ABANDONED = "abandoned"  # the client left; nobody's fault
    FAILED = "failed"  # the replica broke


class Usage(Struct, frozen=True):
    """What the engine said that it did, from the `usage` of its answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int | None = None  # None where the engine runs without --enable-prompt-tokens-details
