"""Faults on command: what a broken replica looks like from outside.

`POST /_fault {"kind": ..., "count": N, "after_writes": W, "factor": F}`, where the replica was started with faults:

  crash          the process dies at once, without a word
  hang           the engine stops: requests are taken and never answered, streams fall silent, /health stays green
  slow           every step takes `factor` times as long
  error_before   500 before the first byte
  error_after    an error event, then [DONE], inside a stream that began with 200
  silent_stream  a stream that says nothing more and stays open
  abort_empty    200 with an empty text and finish_reason "abort"
  cut_stream     the connection is cut
  metrics_stall  /metrics is not answered any more
  metrics_freeze /metrics answers what it was at the time of the order
  lose_events    the next `count` event batches (default: 1) are numbered and kept for replay, but not sent
  none           ends all of them but the loss of events

`error_before` to `cut_stream` strike the next `count` requests for text (default: every one). A stream breaks after
`after_writes` writes (default 1); the first write holds the role and the first token. A request that is not streamed
gets 500, silence or a cut instead of its answer.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from enum import Enum
from typing import TypeVar

from msgspec import Struct

from kvroute.errors import BadRequest, KvrouteError
from kvroute.fake.driver import Driver

T = TypeVar("T")


class Kind(Enum):
    """The faults, under their names on the wire."""

    NONE = "none"
    CRASH = "crash"
    HANG = "hang"
    SLOW = "slow"
    ERROR_BEFORE = "error_before"
    ERROR_AFTER = "error_after"
    SILENT_STREAM = "silent_stream"
    ABORT_EMPTY = "abort_empty"
    CUT_STREAM = "cut_stream"
    METRICS_STALL = "metrics_stall"
    METRICS_FREEZE = "metrics_freeze"
    LOSE_EVENTS = "lose_events"


STRIKES = (Kind.ERROR_BEFORE, Kind.ERROR_AFTER, Kind.SILENT_STREAM, Kind.ABORT_EMPTY, Kind.CUT_STREAM)  # requests


class Fault(Struct, frozen=True, forbid_unknown_fields=True):
    """One order."""

    kind: Kind
    count: int | None = None  # requests to strike; None = all from now on
    after_writes: int = 1  # writes that a struck stream still makes
    factor: float = 10.0  # of `slow`

    def __post_init__(self) -> None:
        if self.count is not None and self.count < 1:
            raise ValueError("count must be at least 1")
        if self.after_writes < 0:
            raise ValueError("after_writes must be at least 0")
        if not self.factor > 0:
            raise ValueError("factor must be greater than 0")


class EngineDied(KvrouteError):
    """The engine failed under a request. The words are vLLM's."""

    def __init__(self) -> None:
        super().__init__("EngineCore encountered an issue. See stack trace (above) for the root cause.")


class ConnectionCut(KvrouteError):
    """The connection is to be cut without another byte."""


class Faults:
    """The fault that is in force, if any."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self.kind = Kind.NONE
        self._fault: Fault | None = None
        self._left = 0

    def order(self, fault: Fault) -> None:
        """Put a fault in force instead of the one before."""
        if fault.kind is Kind.CRASH:
            os._exit(1)
        if fault.kind is Kind.LOSE_EVENTS:
            self._lose_events(fault.count or 1)
            return
        self._driver.hang(fault.kind is Kind.HANG)
        self._driver.slowdown = fault.factor if fault.kind is Kind.SLOW else 1.0
        self.kind = fault.kind
        self._fault = fault if fault.kind in STRIKES else None
        self._left = fault.count or 0

    def _lose_events(self, count: int) -> None:
        feed = self._driver.feed
        if feed is None:
            raise BadRequest("this replica publishes no events; start it with --kv-events", param="kind")
        feed.publisher.dropping += count

    def take(self) -> Fault | None:
        """Return the fault that strikes the request which is starting now."""
        fault = self._fault
        if fault is not None and fault.count is not None:
            self._left -= 1
            if not self._left:
                self._fault = None
        return fault


async def strike(fault: Fault) -> None:
    """Break the answer that is under way, as `fault` says.

    Raises:
        EngineDied: an error is to be reported to the client.
        ConnectionCut: nothing at all is to be reported.
    """
    if fault.kind is Kind.ERROR_AFTER:
        raise EngineDied
    if fault.kind is Kind.CUT_STREAM:
        raise ConnectionCut("cut on command")
    if fault.kind is Kind.SILENT_STREAM:
        await asyncio.Event().wait()  # until the client leaves, which cancels us


async def spoil(batches: AsyncIterator[list[T]], fault: Fault | None) -> AsyncIterator[list[T]]:
    """Pass on what a stream writes, and break it after as many writes as the fault leaves it."""
    passed = 0
    async for batch in batches:
        if fault is not None and passed >= fault.after_writes:
            await strike(fault)
        yield batch
        passed += 1
    if fault is not None:
        await strike(fault)
