"""A map with a bound in bytes that forgets what was not used for a while.

Two generations: entries are written to the young one, and a hit in the old one moves there. When the young one has used
half of the budget, it becomes the old one and the old one is dropped. So an entry in use stays, nothing is ever
searched for a victim, and every operation is a few dictionary steps.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Generations(Generic[K, V]):
    """Keys and values, each with a weight in bytes.

    Args:
        limit_bytes: budget of both generations together.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._half_bytes = limit_bytes // 2
        self._young: dict[K, tuple[V, int]] = {}
        self._old: dict[K, tuple[V, int]] = {}
        self._young_bytes = self._old_bytes = 0

    @property
    def used_bytes(self) -> int:
        """What the entries weigh, counted once for each generation that an entry is in."""
        return self._young_bytes + self._old_bytes

    def __len__(self) -> int:
        return len(self._young.keys() | self._old.keys())

    def __contains__(self, key: K) -> bool:
        return key in self._young or key in self._old

    def get(self, key: K) -> V | None:
        """Return a value and keep it for longer; None if it is not here."""
        found = self._young.get(key)
        if found is None and (found := self._old.get(key)) is not None:
            self._store(key, *found)
        return None if found is None else found[0]

    def put(self, key: K, value: V, weight_bytes: int) -> None:
        """Store a value; one that is heavier than a generation may be is not kept."""
        if weight_bytes <= self._half_bytes:
            self._store(key, value, weight_bytes)

    def _store(self, key: K, value: V, weight_bytes: int) -> None:
        before = self._young.pop(key, None)
        self._young_bytes -= before[1] if before else 0
        if self._young_bytes + weight_bytes > self._half_bytes:
            self._old, self._old_bytes = self._young, self._young_bytes
            self._young, self._young_bytes = {}, 0
        self._young[key] = (value, weight_bytes)
        self._young_bytes += weight_bytes
