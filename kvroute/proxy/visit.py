"""One request from arrival to end, as the log and the counters see it."""

from __future__ import annotations

import time

from kvroute.proxy.request_log import Line, RequestLog
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.lease import Lease


class Visit:
    """Filled in on the way of a request; closed once, at its end."""

    __slots__ = (
        "arrived_s",
        "attempts",
        "began_s",
        "hit_tokens",
        "id",
        "miss_tokens",
        "model",
        "outcome",
        "replica",
        "status",
        "tenant",
        "why",
    )

    def __init__(self, id: str, now_s: float) -> None:
        self.id = id
        self.arrived_s = now_s
        self.began_s: float | None = None  # first byte of the answer that the client got
        self.tenant = ""
        self.model = ""
        self.replica = ""
        self.hit_tokens = 0  # predicted
        self.miss_tokens = 0
        self.attempts = 0
        self.outcome = "refused"  # until a replica has it: done, abandoned, failed
        self.status = 0
        self.why = ""  # what went wrong

    def took(self, lease: Lease) -> None:
        """Note where an attempt goes."""
        self.replica = lease.replica.id
        self.hit_tokens = lease.placement.hit_tokens
        self.miss_tokens = lease.placement.miss_tokens

    def ended(self, outcome: str, why: str = "") -> None:
        """Note what became of the request."""
        self.outcome, self.why = outcome, why

    def close(self, stats: HandlerStats, log: RequestLog, now_s: float) -> None:
        """Count the request and write its line."""
        stats.count(self.outcome, self.status)
        total_s = now_s - self.arrived_s
        stats.total.observe(total_s)
        ttft_s = None
        if self.began_s is not None:
            ttft_s = self.began_s - self.arrived_s
            stats.ttft.observe(ttft_s)
        if log.is_on:
            log.add(self._line(ttft_s, total_s))

    def _line(self, ttft_s: float | None, total_s: float) -> Line:
        return Line(
            round(time.time(), 3),
            self.id,
            self.tenant,
            self.model,
            self.replica,
            self.hit_tokens,
            self.miss_tokens,
            self.attempts,
            self.outcome,
            self.status,
            None if ttft_s is None else round(ttft_s, 4),
            round(total_s, 4),
            self.why,
        )
