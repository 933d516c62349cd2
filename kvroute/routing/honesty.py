"""How far the index is right about each replica: what it predicted against what was delivered, of late.

Sums that forget, so that a replica is judged by its last hundred requests or so. One that delivers far less than was
predicted (prefix caching is off, events are lost unseen, its tokens are others than ours) is *distrusted*: its holdings
count in proportion to what it delivers, until it delivers again. Lesser shortfalls are usual where a cache is full, and
change nothing. Delivering more than predicted is no fault.

This file does not know blocks, indexes or clocks.
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from kvroute.routing.replica import ReplicaId

MEMORY = 0.99  # weight of the past with each request
PREDICTED_MIN = 8  # requests with a prediction, before anything is concluded
SHORT, MENDED = 0.3, 0.5
"""Share delivered, below which trust ends, and above which it returns. A cache under pressure evicts between prediction
and admission: a real engine of 72 blocks delivered 62 % to eight clients, and its index was right."""
REPLICAS_MAX = 10_000


class Record(Struct):
    """One replica's predictions and deliveries, in tokens that fade."""

    predicted: float = 0.0
    delivered: float = 0.0  # of what was predicted
    requests: float = 0.0  # with a prediction
    unpredicted: float = 0.0  # delivered beyond what was predicted
    is_distrusted: bool = False
    falls: int = 0  # times that trust ended

    @property
    def share(self) -> float:
        """How much of what was predicted was delivered."""
        return self.delivered / self.predicted if self.predicted else 1.0


class Honesty:
    """The records of all replicas."""

    def __init__(self) -> None:
        self._records: dict[ReplicaId, Record] = {}
        self._distrusted: dict[ReplicaId, float] = {}  # share that their holdings count for

    @property
    def records(self) -> Mapping[ReplicaId, Record]:
        """What is known of each replica."""
        return self._records

    def observe(self, replica: ReplicaId, predicted: int, delivered: int) -> bool:
        """Take in one request's tokens; return whether the replica has just lost our trust."""
        record = self._records.get(replica)
        if record is None:
            if len(self._records) >= REPLICAS_MAX:
                self.forget(next(iter(self._records)))
            record = self._records[replica] = Record()
        record.unpredicted = MEMORY * record.unpredicted + max(delivered - predicted, 0)
        if predicted:
            record.predicted = MEMORY * record.predicted + predicted
            record.delivered = MEMORY * record.delivered + min(delivered, predicted)
            record.requests = MEMORY * record.requests + 1
        return self._judge(replica, record)

    def forget(self, replica: ReplicaId) -> None:
        """Begin anew with a replica: it has restarted, or left."""
        self._records.pop(replica, None)
        self._distrusted.pop(replica, None)

    def discounted(self, hits: dict[ReplicaId, int]) -> dict[ReplicaId, int]:
        """Return hits as they count, given those that the index says."""
        for replica, share in self._distrusted.items():
            if replica in hits:
                hits[replica] = int(hits[replica] * share)
        return hits

    def _judge(self, replica: ReplicaId, record: Record) -> bool:
        was_distrusted = record.is_distrusted
        if record.requests >= PREDICTED_MIN and record.share < SHORT:
            record.is_distrusted = True
        elif record.share >= MENDED:
            record.is_distrusted = False
        if record.is_distrusted:
            self._distrusted[replica] = record.share
        else:
            self._distrusted.pop(replica, None)
        has_fallen = record.is_distrusted and not was_distrusted
        record.falls += has_fallen
        return has_fallen
