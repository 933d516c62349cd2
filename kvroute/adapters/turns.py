"""Short turns on the event loop for work that comes faster than it can be done, so that requests never wait long.

All who share one `Turns` share its time: however many streams have a backlog, together they hold the loop for TURN_S
and then let everything else run that is ready. What the work is, is not known here.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

TURN_S = 0.002  # a request that meets a backlog waits so long at each of its steps; one piece of work may run over


class Turns:
    """Gives turns to those who want one, in the order in which they asked. Belongs to one event loop."""

    def __init__(self, turn_s: float = TURN_S) -> None:
        self.alone = asyncio.Lock()  # for tasks that take turns among themselves
        self._turn_s = turn_s
        self._waiting: deque[Callable[[float], bool]] = deque()
        self._is_due = False

    def want(self, work: Callable[[float], bool]) -> None:
        """Have `work` called soon, with the monotonic time at which it should end, and again while it returns True:
        there is more to do. It must not raise. Who waits already is not called twice."""
        if work not in self._waiting:
            self._waiting.append(work)
        self._call()

    def _call(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._run)

    def _run(self) -> None:
        self._is_due = False
        until_s = time.monotonic() + self._turn_s
        while self._waiting:
            work = self._waiting.popleft()
            if work(until_s) and work not in self._waiting:
                self._waiting.append(work)
            if time.monotonic() >= until_s:
                break
        if self._waiting:
            self._call()
