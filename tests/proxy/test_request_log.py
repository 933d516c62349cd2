"""Lines of finished requests, in batches."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from kvroute.proxy.request_log import LINES_MAX, Line, RequestLog


def line(number: int) -> Line:
    return Line(2e9, f"id-{number}", "default", "m", "r0", 0, 1, 1, "done", 200, None, 0.5)


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvroute.requests")


async def test_lines_come_soon(caplog: pytest.LogCaptureFixture):
    """Lines are written without being asked for, one JSON object each; what did not go wrong is not in them."""
    log = RequestLog()
    for number in range(3):
        log.add(line(number))
    assert caplog.messages == []
    while not caplog.messages:
        await asyncio.sleep(0.01)
    lines = [json.loads(text) for text in caplog.messages[0].split("\n")]
    assert [fields["id"] for fields in lines] == ["id-0", "id-1", "id-2"]
    assert [(fields["ttft_s"], "why" in fields) for fields in lines] == [(None, False)] * 3


async def test_flush(caplog: pytest.LogCaptureFixture):
    """At the end of the process what was collected is written at once, and only once."""
    log = RequestLog()
    log.add(line(1))
    log.flush()
    log.flush()
    assert len(caplog.messages) == 1


async def test_batches_are_bounded(caplog: pytest.LogCaptureFixture):
    """A full batch is written early."""
    log = RequestLog()
    for number in range(LINES_MAX):
        log.add(line(number))
    assert len(caplog.messages) == 1


async def test_off(caplog: pytest.LogCaptureFixture):
    """Turned off, by its switch or by its logger's level, it says so, and nobody makes lines for it."""
    assert RequestLog().is_on
    assert not RequestLog(is_on=False).is_on
    caplog.set_level(logging.WARNING, "kvroute.requests")
    assert not RequestLog().is_on
