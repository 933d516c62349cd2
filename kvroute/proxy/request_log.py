"""One line of JSON per finished request, written in batches: a record and a write for each would be a tenth of the
router's work.

The lines go to the logger `kvroute.requests`, several to a record. Each carries its own time, so a handler for that
logger needs no prefix.
"""

from __future__ import annotations

import asyncio
import logging

import msgspec
from msgspec import Struct

log = logging.getLogger("kvroute.requests")

FLUSH_S = 0.25
LINES_MAX = 1024  # of a batch; more flush it early

_encoder = msgspec.json.Encoder()


class Line(Struct, frozen=True, omit_defaults=True):
    """What is written of a request; all times in seconds."""

    at_s: float  # Unix time of its end
    id: str
    tenant: str
    model: str
    replica: str  # "" where none had it
    hit_tokens: int  # predicted
    miss_tokens: int
    attempts: int
    outcome: str
    status: int
    ttft_s: float | None
    total_s: float
    why: str = ""  # what went wrong


class RequestLog:
    """Collects lines. What is not flushed yet is lost if the process is killed."""

    def __init__(self, *, is_on: bool = True) -> None:
        self._is_on = is_on
        self._lines: list[bytes] = []
        self._flush: asyncio.TimerHandle | None = None

    @property
    def is_on(self) -> bool:
        """Whether lines are written at all."""
        return self._is_on and log.isEnabledFor(logging.INFO)

    def add(self, line: Line) -> None:
        """Write a line soon."""
        self._lines.append(_encoder.encode(line))
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
