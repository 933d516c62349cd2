"""What goes into a simulated engine and what comes out of it."""

from __future__ import annotations

from typing import Literal, NewType

from msgspec import Struct

from kvroute.kv.chain import PrefixChain
from kvroute.kv.pool import CacheEvent
from kvroute.sim.engine import seconds

RequestId = NewType("RequestId", str)


class SimRequest(Struct, frozen=True):
    """One sequence to generate."""

    id: RequestId
    chain: PrefixChain  # block hashes of the prompt and the answer; blocks past its end are never cached
    prompt_tokens: int
    output_tokens: int  # length of the answer, at least 1
    priority: int = 0  # the smaller, the earlier; only where the policy is "priority"
    reads_cache: bool = True  # False where logprobs of the prompt are wanted: then all of it is computed


class Limits(Struct, frozen=True, kw_only=True):
    """The scheduler's settings, under vLLM's names, with the defaults of its server on a large accelerator."""

    max_num_batched_tokens: int = 8192  # tokens that a step computes at most
    max_num_seqs: int = 1024  # sequences that run at once
    long_prefill_token_threshold: int = (
        0  # tokens of a prompt that a step computes where others are there; 0 = no bound
    )
    enable_chunked_prefill: bool = True  # False: a prompt is admitted only if the rest of the budget holds all of it
    reserve_full_prompt: bool = True  # admission needs blocks for the whole prompt (scheduler_reserve_full_isl)
    watermark: float = 0.0  # share of the blocks that an admission leaves free while others run
    policy: Literal["fcfs", "priority"] = "fcfs"
    async_scheduling: bool = False  # the next step is scheduled before this one's tokens are known

    def __post_init__(self) -> None:
        for name in ("max_num_batched_tokens", "max_num_seqs"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.long_prefill_token_threshold < 0:
            raise ValueError(
                f"long_prefill_token_threshold must be at least 0, got {self.long_prefill_token_threshold}"
            )
        if not 0 <= self.watermark < 1:
            raise ValueError(f"watermark must be from 0 to 1 (a share of the blocks), got {self.watermark}")


class Offload(Struct, frozen=True):
    """CPU memory behind the engine's cache. What is found there is copied back before the prompt's first chunk.

    The step that admits a sequence waits for its copy; vLLM lets others run meanwhile, so those are slightly too slow.
    Copies to CPU memory cost nothing here: they run beside the steps.
    """

    num_blocks: int
    block_copy_fs: int  # time to copy one block back, in femtoseconds


class Step(Struct, frozen=True):
    """The first half of a step: what was scheduled."""

    duration_fs: int  # femtoseconds
    scheduled: dict[RequestId, int]  # tokens that each sequence computes; empty where it was not asked for
    admitted: dict[
        RequestId, int
    ]  # sequences admitted for the first time, and the prompt tokens that each found cached
    preempted: tuple[RequestId, ...]
    sequences: int = 0  # how many compute anything; 0: no request fits, and only an abort or another request can help

    @property
    def duration_s(self) -> float:
        """Seconds that the step takes."""
        return seconds(self.duration_fs)


class StepResult(Struct, frozen=True):
    """The second half: what came of it."""

    produced: tuple[RequestId, ...]  # sequences that got one token each; empty where it was not asked for
    first: tuple[RequestId, ...]  # those for which it was the first token
    finished: tuple[RequestId, ...]  # those for which it was the last
    events: tuple[CacheEvent, ...]  # what happened in the cache since the step before


class Counters(Struct):
    """Totals since the start, in tokens where not said otherwise. Resumed sequences have their own pair."""

    prefix_queries: int = 0
    prefix_hits: int = 0
    resumed_queries: int = 0
    resumed_hits: int = 0
    external_queries: int = 0  # looked up in CPU memory: what the engine's own cache had not
    external_hits: int = 0
    preemptions: int = 0  # times
    prompt_tokens: int = 0  # of sequences whose prompt was computed
    generation_tokens: int = 0
    finished: int = 0  # sequences
    aborted: int = 0  # sequences
