"""One step of a simulated engine between being scheduled and delivering its tokens."""

from __future__ import annotations

from kvroute.kv.chain import PrefixChain
from kvroute.sim.engine import StepWork
from kvroute.sim.sequence import Sequence
from kvroute.sim.values import RequestId


class Flight:
    """One scheduled step, until its tokens are delivered."""

    __slots__ = (
        "admitted",
        "chunks",
        "copied_blocks",
        "decodes",
        "filled",
        "kv_tokens",
        "left_out",
        "news",
        "preempted",
        "producers",
        "stale",
        "step",
    )

    def __init__(self, step: int) -> None:
        self.step = step
        self.chunks: dict[Sequence, tuple[int, int]] = {}  # (tokens before, tokens) of the prompts that it computes
        self.decodes = 0  # sequences that compute one token each
        self.kv_tokens = 0  # tokens in their cache before the step
        self.producers = 0  # sequences that get a token from it
        self.news: dict[Sequence, int] = {}  # those with more to deliver than a token, and the block that is full then
        self.stale: list[Sequence] = []  # those preempted since, which get their token all the same
        self.left_out: set[Sequence] = set()  # decoding sequences that it left out
        self.admitted: dict[RequestId, int] = {}
        self.preempted: list[RequestId] = []
        self.copied_blocks = 0  # that come back from CPU memory before it starts
        self.filled: list[tuple[PrefixChain, int, int]] = []  # blocks that it computes: chain, first, past the last

    @property
    def sequences(self) -> int:
        """How many compute anything."""
        return len(self.chunks) + self.decodes

    @property
    def is_idle(self) -> bool:
        """Whether it brings nothing but a token for each of its sequences."""
        return not (self.chunks or self.news or self.preempted or self.filled)

    @property
    def work(self) -> StepWork:
        """What it computes. The last known token of a prompt is a chunk; the tokens after it decode."""
        return StepWork(prefills=tuple(self.chunks.values()), decodes=self.decodes, kv_tokens=self.kv_tokens)

    def serves(self, sequence: Sequence) -> bool:
        """Whether it produces a token for a sequence."""
        return sequence.takes_part_in(self.step) and sequence not in self.left_out
