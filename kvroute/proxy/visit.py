"""One request from arrival to end, as the log and the counters see it."""

from __future__ import annotations

from kvroute.proxy.request_log import RequestLog
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
        log.add(self._fields(ttft_s, total_s))

    def _fields(self, ttft_s: float | None, total_s: float) -> dict[str, object]:
        fields: dict[str, object] = {
            "id": self.id,
            "tenant": self.tenant,
            "model": self.model,
            "replica": self.replica,
            "hit_tokens": self.hit_tokens,
            "miss_tokens": self.miss_tokens,
            "attempts": self.attempts,
            "outcome": self.outcome,
            "status": self.status,
            "ttft_s": None if ttft_s is None else round(ttft_s, 4),
            "total_s": round(total_s, 4),
        }
        if self.why:
            fields["why"] = self.why
        return fields
