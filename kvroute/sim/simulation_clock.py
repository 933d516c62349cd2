"""A heap of due times. Times are whole femtoseconds, and of what is due at one moment steps of engines end first, then
what was scheduled earlier comes earlier: so the order of events depends on nothing but the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from kvroute.sim.engine import FS, seconds

STEPS, LATER = 0, 1  # ranks of what is due at one moment

Task = Callable[[Any], None]


def fs_of(at_s: float) -> int:
    """Turn seconds into femtoseconds."""
    return round(at_s * FS)


class Clock:
    """Simulated time, and what is to be done when. Bounded by what its users schedule ahead."""

    def __init__(self) -> None:
        self.now_fs = 0
        self._heap: list[tuple[int, int, int, Task, Any]] = []
        self._scheduled = 0

    @property
    def now_s(self) -> float:
        """Seconds since the start."""
        return seconds(self.now_fs)

    def at(self, due_fs: int, task: Task, what: Any = None, rank: int = LATER) -> None:
        """Have `task(what)` called at a time, or now where that is past."""
        self._scheduled += 1
        heappush(self._heap, (max(due_fs, self.now_fs), rank, self._scheduled, task, what))

    def after(self, wait_s: float, task: Task, what: Any = None) -> None:
        """Have `task(what)` called after some seconds."""
        self.at(self.now_fs + fs_of(wait_s), task, what)

    def run(self) -> None:
        """Let time pass until nothing is left to do."""
        heap = self._heap
        while heap:
            self.now_fs, _, _, task, what = heappop(heap)
            task(what)
