"""Counters of the request path: plain integers, so that counting costs nothing. Telemetry turns them into metrics."""

from __future__ import annotations

from bisect import bisect_left

BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Histogram:
    """How many durations fell between which bounds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_S) + 1)  # the last one: above all bounds
        self.sum_s = 0.0

    def observe(self, duration_s: float) -> None:
        """Count one."""
        self.counts[bisect_left(BOUNDS_S, duration_s)] += 1
        self.sum_s += duration_s

    def cumulative(self) -> list[tuple[str, int]]:
        """Return upper bound and count up to it, as Prometheus wants them."""
        total, rows = 0, []
        for bound, count in zip((*map(str, BOUNDS_S), "+Inf"), self.counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


class HoldStats:
    """What became of requests that were held until memory fits."""

    def __init__(self) -> None:
        self.now = 0
        self.begun = 0
        self.ended = {"placed": 0, "expired": 0, "failed": 0, "left": 0}  # failed: no replica is left that could
        self.refused = 0  # not held at all, because too much is held already
        self.longest_s = 0.0
        self.time = Histogram()

    def begin(self) -> None:
        """Count a request that is held from now on."""
        self.now += 1
        self.begun += 1

    def end(self, outcome: str, duration_s: float) -> None:
        """Count the end of a hold; `outcome` is one of those in `ended`."""
        self.now -= 1
        self.ended[outcome] += 1
        self.longest_s = max(self.longest_s, duration_s)
        self.time.observe(duration_s)


class HandlerStats:
    """What became of all requests since the start."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}  # (outcome, status) -> requests
        self.active = 0  # now under way
        self.held = 0  # of these, waiting for any replica
        self.holds = HoldStats()  # of these, those that wait for memory
        self.retries = 0  # attempts after a first one
        self.refused_reservations = 0  # places that another router took first
        self.local_lookups = 0  # answered by the router's own shadow because the index was late or down
        self.lookups = 0
        self.unread_prompts = 0  # routed by load alone, because the prompt was not understood
        self.unexpected_errors = 0  # our own mistakes
        self.answers_learnt = 0  # generated blocks that went into the index
        self.answers_not_learnt = 0
        self.ttft = Histogram()  # to the first byte of a stream
        self.total = Histogram()

    def count(self, outcome: str, status: int) -> None:
        """Count a finished request."""
        key = (outcome, status)
        self.requests[key] = self.requests.get(key, 0) + 1
