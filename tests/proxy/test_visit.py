"""One request as the log and the counters see it."""

from __future__ import annotations

from collections.abc import Mapping

from kvroute.proxy.request_log import RequestLog
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.visit import Visit


def closed(visit: Visit) -> tuple[HandlerStats, list[Mapping[str, object]]]:
    """Close a visit; return the counters and the lines."""
    stats, log = HandlerStats(), Lines()
    visit.close(stats, log, 3.0)
    return stats, log.lines


class Lines(RequestLog):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[Mapping[str, object]] = []

    def add(self, fields: Mapping[str, object]) -> None:
        self.lines.append(fields)


def test_line():
    """The line at the end of a request says what happened, and the counters agree."""
    visit = Visit("id-1", 1.0)
    visit.began_s, visit.status, visit.attempts = 1.5, 200, 2
    visit.ended("done")
    stats, (line,) = closed(visit)
    assert {"id": "id-1", "outcome": "done", "attempts": 2, "ttft_s": 0.5, "total_s": 2.0}.items() <= line.items()
    assert "why" not in line
    assert (stats.requests, stats.ttft.sum_s, stats.total.sum_s) == ({("done", 200): 1}, 0.5, 2.0)


def test_nothing_began():
    """A request without a first byte has no time to it, and says why."""
    visit = Visit("id-1", 1.0)
    visit.ended("failed", "r0 is gone")
    stats, (line,) = closed(visit)
    assert (line["ttft_s"], line["why"]) == (None, "r0 is gone")
    assert sum(stats.ttft.counts) == 0
