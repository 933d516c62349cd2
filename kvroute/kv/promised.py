"""What a router has just sent to replicas whose events say what they hold, until those events can have come.

An engine tells of a block only after the step that filled it. Requests with one prompt that come at once would find
nobody who holds it, and scatter; so until the answer, and for a short while at most, what was sent counts as held. Two
generations of what was sent, each for half of LIFE_S: the older is dropped whole, and nothing is searched. Bounded by
the replica's capacity.

A hybrid (`hit_ends`) keeps a prompt's end and not every block before it: of what it was sent only whole prompts count.

Who hears the engine may say what it has told of (`settle`); otherwise whoever asks takes the deeper of both.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from kvroute.kv.chain import HASH_BYTES, PrefixChain
from kvroute.kv.residency import Residency

TELLING_S = 0.5  # after an answer, for the engine's last events to reach the index
KEPT_MAX = 1024
LIFE_S = 4.0  # longer than an engine step and its event take, shorter than anything is evicted in


class Promised:
    """What was sent to one replica in the last LIFE_S seconds, half of that at least."""

    def __init__(self, capacity_blocks: int) -> None:
        self._young = Residency(capacity_blocks)
        self._old = Residency(capacity_blocks)
        self._ends: tuple[set[bytes], set[bytes]] = (set(), set())  # last blocks of the young and of the old prompts
        self._kept: deque[tuple[float, PrefixChain]] = deque()  # computed, and when that ends the promise
        self._turn_s = 0.0  # when the young become the old

    def record(self, chain: PrefixChain, now_s: float, end_blocks: int | None = None) -> None:
        """Note that a chain was sent; the same prompt finds `end_blocks` of it again, if not all."""
        self._advance(now_s)
        self._young.record(chain)
        if len(self._ends[0]) < self._young.capacity_blocks:
            self._ends[0].add(_last_block(chain, end_blocks))

    def take_back(self, chain: PrefixChain, held_blocks: int) -> None:
        """Note that a chain was not computed beyond its first blocks after all."""
        self._young.correct(chain, held_blocks)
        self._old.correct(chain, held_blocks)
        for ends in self._ends:
            ends.difference_update({_last_block(chain), _last_block(chain[:-HASH_BYTES])})

    def keep(self, chain: PrefixChain, now_s: float) -> None:
        """Note that a chain was computed, so that the engine tells of it about now; what others were sent stays."""
        self._advance(now_s)
        if len(self._kept) >= KEPT_MAX:
            self._forget(self._kept.popleft()[1])
        self._kept.append((now_s + TELLING_S, chain))

    def settle(self, has_told: Callable[[PrefixChain], bool]) -> None:
        """End the promises of chains that the engine has told of: what it says after that is the truth."""
        while self._kept and has_told(self._kept[0][1]):
            self._forget(self._kept.popleft()[1])

    def held(self, chain: PrefixChain, now_s: float, *, to_ends: bool = False) -> int:
        """Return how many leading blocks of a chain were sent; with `to_ends`, of those that end where a prompt did."""
        self._advance(now_s)
        deepest = self._young.held(chain) if len(self._young) else 0
        deepest = max(deepest, self._old.held(chain)) if len(self._old) else deepest
        if not to_ends:
            return deepest
        young, old = self._ends
        return next((n for n in range(deepest, 0, -1) if (end := _last_block(chain, n)) in young or end in old), 0)

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
        self._ends = (set(), self._ends[0] if is_recent else set())
        self._young = Residency(self._young.capacity_blocks) if is_recent or len(self._young) else self._young
        self._turn_s = (self._turn_s if is_recent else now_s) + LIFE_S / 2  # however late somebody asks


def _last_block(chain: bytes, blocks: int | None = None) -> bytes:
    end = len(chain) if blocks is None else blocks * HASH_BYTES
    return chain[max(0, end - HASH_BYTES) : end]
