"""A worker process as the supervisor holds it."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from kvroute.workers.process import WorkerProcess
from kvroute.workers.staff import Post
from tests.processes import SimulatedReplica
from tests.workers.lent import lent

pytestmark = pytest.mark.slow  # real processes, many of them


@asynccontextmanager
async def started(replica: SimulatedReplica, directory: Path) -> AsyncIterator[WorkerProcess]:
    with lent(replica, directory) as assignment:
        worker = await WorkerProcess.start(Post(1, 0, 0), assignment, verbose=False)
        try:
            yield worker
        finally:
            worker.kill()


async def test_a_worker_from_its_start_to_its_end(replica, tmp_path):
    """It is started, says that it serves, answers questions, and says at its end what it counted."""
    async with started(replica, tmp_path) as worker:
        assert (await worker.hear()).serves
        assert await worker.ask("GET", "/health") == (
            200, "application/json; charset=utf-8", b'{"status": "ok"}',
        )  # fmt: skip
        worker.stop()
        assert (await worker.hear()).stops
        assert "kvroute_requests_active" in (await worker.hear()).metrics
        assert await worker.hear() is None
        assert await worker.ended() == 0


async def test_a_killed_worker_says_nothing_more(replica, tmp_path):
    """Its words end, and its code tells the signal."""
    async with started(replica, tmp_path) as worker:
        worker.kill()
        assert await worker.hear() is None
        assert await worker.ended() == -signal.SIGKILL
