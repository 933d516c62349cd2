"""Lookups under way in Redis, and the deadline that all of them have.

A lookup is answered, has failed, or is late, whatever comes first; `done` says which way it went. Nothing here knows
what replies mean.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

from kvroute.adapters.redis_wire import Reply

BUSY_S = 0.002  # a timer that fires this much late says that our own event loop was busy, not Redis


class Lookup:
    """The calls of one `match`, until all are answered, one has failed, or time is up."""

    __slots__ = ("_missing", "done", "due_s", "is_late", "replies")

    def __init__(self, calls: int, due_s: float, done: asyncio.Future[bool]) -> None:
        self.replies: list[Reply] = [None] * calls
        self.due_s = due_s
        self.is_late = False
        self.done = done
        self._missing = calls

    def answer(self, number: int, reply: Reply) -> None:
        if self.done.done():
            return
        self.replies[number] = reply
        self._missing -= 1
        if isinstance(reply, Exception):
            self.done.set_result(False)
        elif not self._missing:
            self.done.set_result(True)

    def expire(self) -> None:
        if not self.done.done():
            self.is_late = True
            self.done.set_result(False)


class Deadlines:
    """Ends lookups whose time is up. All are given the same time, so they end in order and one timer serves all."""

    def __init__(self) -> None:
        self._lookups: deque[Lookup] = deque()  # answered ones too, until their time is up
        self._timer: asyncio.TimerHandle | None = None

    def watch(self, lookup: Lookup, now_s: float) -> None:
        self._lookups.append(lookup)
        if self._timer is None:
            self._look_at(lookup.due_s, now_s)

    def close(self) -> None:
        """End all lookups now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        while self._lookups:
            self._lookups.popleft().expire()

    def _look_at(self, due_s: float, now_s: float, is_last: bool = False) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(due_s - now_s, self._look, due_s, is_last)

    def _look(self, due_s: float, is_last: bool) -> None:
        lookups, self._timer = self._lookups, None
        now_s = time.monotonic()  # not the loop's time, which uvloop keeps from the beginning of the loop's turn
        if now_s > due_s + BUSY_S and not is_last:
            # Answers may lie in the socket, unread: let the loop look once more.
            self._look_at(now_s + BUSY_S, now_s, True)
            return
        while lookups and (lookups[0].due_s <= now_s or lookups[0].done.done()):
            lookups.popleft().expire()
        if lookups:
            self._look_at(lookups[0].due_s, now_s)
