"""One request as the log and the counters see it."""

from __future__ import annotations

import json
import logging

import pytest

from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.visit import Visit


def closed(visit: Visit, *, logs: bool = True) -> HandlerStats:
    stats = HandlerStats()
    visit.close(stats, 3.0, logs=logs)
    return stats


def test_line(caplog: pytest.LogCaptureFixture):
    """The line at the end of a request is one JSON object with what happened."""
    visit = Visit("id-1", 1.0)
    visit.began_s, visit.status, visit.attempts = 1.5, 200, 2
    visit.ended("done")
    with caplog.at_level(logging.INFO, "kvroute.requests"):
        stats = closed(visit)
    line = json.loads(caplog.messages[0])
    assert {"id": "id-1", "outcome": "done", "attempts": 2, "ttft_s": 0.5, "total_s": 2.0}.items() <= line.items()
    assert "why" not in line
    assert (stats.requests, stats.ttft.sum_s, stats.total.sum_s) == ({("done", 200): 1}, 0.5, 2.0)


def test_nothing_began(caplog: pytest.LogCaptureFixture):
    """A request without a first byte has no time to it, and says why."""
    visit = Visit("id-1", 1.0)
    visit.ended("failed", "r0 is gone")
    with caplog.at_level(logging.INFO, "kvroute.requests"):
        stats = closed(visit)
    line = json.loads(caplog.messages[0])
    assert (line["ttft_s"], line["why"]) == (None, "r0 is gone")
    assert sum(stats.ttft.counts) == 0


def test_lines_can_be_turned_off(caplog: pytest.LogCaptureFixture):
    """Without the setting nothing is written, and everything is counted."""
    with caplog.at_level(logging.INFO, "kvroute.requests"):
        stats = closed(Visit("id-1", 1.0), logs=False)
    assert (caplog.messages, sum(stats.total.counts)) == ([], 1)
