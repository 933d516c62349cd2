"""One request as the log and the counters see it."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from kvroute.proxy.request_log import Line, RequestLog
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.visit import Visit


@pytest.fixture(autouse=True)
def _logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvroute.requests")


def closed(visit: Visit) -> tuple[HandlerStats, list[dict[str, Any]]]:
    """Close a visit; return the counters and the lines."""
    stats, log = HandlerStats(), Lines()
    visit.close(stats, log, 3.0)
    return stats, log.lines


class Lines(RequestLog):
    """Keeps the lines."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[dict[str, Any]] = []

    def add(self, line: Line) -> None:
        self.lines.append(msgspec.structs.asdict(line))


def test_line():
    """The line at the end of a request says what happened, and the counters agree."""
    visit = Visit("id-1", 1.0)
    visit.began_s, visit.status, visit.attempts = 1.5, 200, 2
    visit.ended("done")
    stats, (line,) = closed(visit)
    assert {"id": "id-1", "outcome": "done", "attempts": 2, "ttft_s": 0.5, "total_s": 2.0}.items() <= line.items()
    assert not line["why"]
    assert (stats.requests, stats.ttft.sum_s, stats.total.sum_s) == ({("done", 200): 1}, 0.5, 2.0)


def test_nothing_began():
    """A request without a first byte has no time to it, and says why."""
    visit = Visit("id-1", 1.0)
    visit.ended("failed", "r0 is gone")
    stats, (line,) = closed(visit)
    assert (line["ttft_s"], line["why"]) == (None, "r0 is gone")
    assert sum(stats.ttft.counts) == 0
