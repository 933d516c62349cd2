"""Lines of finished requests, in batches."""

from __future__ import annotations

import asyncio
import json
import logging

import pytest

from kvroute.proxy.request_log import LINES_MAX, RequestLog


@pytest.fixture(autouse=True)
def _captured(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kvroute.requests")


async def test_lines_come_soon(caplog: pytest.LogCaptureFixture):
    """Lines are written without being asked for, one JSON object each, with their time."""
    log = RequestLog()
    for number in range(3):
        log.add({"id": number})
    assert caplog.messages == []
    while not caplog.messages:
        await asyncio.sleep(0.01)
    lines = [json.loads(line) for line in caplog.messages[0].split("\n")]
    assert [line["id"] for line in lines] == [0, 1, 2]
    assert all(line["at_s"] > 1e9 for line in lines)


async def test_flush(caplog: pytest.LogCaptureFixture):
    """At the end of the process what was collected is written at once, and only once."""
    log = RequestLog()
    log.add({"id": 1})
    log.flush()
    log.flush()
    assert len(caplog.messages) == 1


async def test_batches_are_bounded(caplog: pytest.LogCaptureFixture):
    """A full batch is written early."""
    log = RequestLog()
    for number in range(LINES_MAX):
        log.add({"id": number})
    assert len(caplog.messages) == 1


async def test_off(caplog: pytest.LogCaptureFixture):
    """Turned off, nothing is collected."""
    log = RequestLog(is_on=False)
    log.add({"id": 1})
    log.flush()
    assert caplog.messages == []
