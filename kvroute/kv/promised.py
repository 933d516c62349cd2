"""What a router has just sent to replicas whose events say what they hold, until those events can have come.

An engine tells of a block only after the step that filled it. Requests with one prompt that come at once would find
nobody who holds it, and scatter; so until the answer, and for a short while at most, what was sent counts as held. Two
generations of what was sent, each for half of LIFE_S: the older is dropped whole, and nothing is searched. Bounded by
the replica's capacity.

It does not know whether the engine has told of a block meanwhile: whoever asks takes the deeper of both.
"""

from __future__ import annotations

from collections import deque

from kvroute.kv.chain import PrefixChain
from kvroute.kv.residency import Residency

TELLING_S = 0.5  # after an answer, for the engine's last events to reach the index
KEPT_MAX = 1024
LIFE_S = 4.0  # longer than an engine step and its event take, shorter than anything is evicted in


class Promised:
    """What was sent to one replica in the last LIFE_S seconds, half of that at least."""

    def __init__(self, capacity_blocks: int) -> None:
        self._young = Residency(capacity_blocks)
        self._old = Residency(capacity_blocks)
        self._kept: deque[tuple[float, PrefixChain]] = deque()  # computed, and when that ends the promise
        self._turn_s = 0.0  # when the young become the old

    def record(self, chain: PrefixChain, now_s: float) -> None:
        """Note that a chain was sent."""
        self._advance(now_s)
        self._young.record(chain)

    def take_back(self, chain: PrefixChain, held_blocks: int) -> None:
        """Note that a chain was not computed beyond its first blocks after all."""
        self._young.correct(chain, held_blocks)
        self._old.correct(chain, held_blocks)

    def keep(self, chain: PrefixChain, now_s: float) -> None:
        """Note that a chain was computed, so that the engine tells of it about now; what others were sent stays."""
        self._advance(now_s)
        if len(self._kept) >= KEPT_MAX:
            self._forget(self._kept.popleft()[1])
        self._kept.append((now_s + TELLING_S, chain))

    def held(self, chain: PrefixChain, now_s: float) -> int:
        """Return how many leading blocks of a chain were sent."""
        self._advance(now_s)
        deepest = self._young.held(chain) if len(self._young) else 0
        return max(deepest, self._old.held(chain)) if len(self._old) else deepest

    def _forget(self, chain: PrefixChain) -> None:
        self._young.forget(chain)
        self._old.forget(chain)

    def _advance(self, now_s: float) -> None:
        while self._kept and self._kept[0][0] <= now_s:
            self._forget(self._kept.popleft()[1])
        if now_s < self._turn_s:
            return
        empty = Residency(self._young.capacity_blocks)
        is_recent = now_s < self._turn_s + LIFE_S / 2
        self._old = self._young if is_recent else empty
        self._young = Residency(self._young.capacity_blocks) if is_recent or len(self._young) else self._young
        self._turn_s = now_s + LIFE_S / 2
