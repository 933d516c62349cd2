"""One line of JSON per finished request, written in batches: a record and a write for each would be a tenth of the
router's work.

The lines go to the logger `kvroute.requests`, several to a record. Each carries its own time, so a handler for that
logger needs no prefix.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping

import msgspec

log = logging.getLogger("kvroute.requests")

FLUSH_S = 0.25
LINES_MAX = 1024  # of a batch; more flush it early


class RequestLog:
    """Collects lines. What is not flushed yet is lost if the process is killed."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._lines: list[bytes] = []
        self._flush: asyncio.TimerHandle | None = None

    def add(self, fields: Mapping[str, object]) -> None:
        """Write a line soon."""
        if not self._is_on or not log.isEnabledFor(logging.INFO):
            return
        self._lines.append(msgspec.json.encode({"at_s": round(time.time(), 3), **fields}))
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(FLUSH_S, self.flush)
        if len(self._lines) >= LINES_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what was collected."""
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None
        if self._lines:
            text = b"\n".join(self._lines).decode()
            self._lines.clear()
            log.info("%s", text)
