"""A worker process as the supervisor holds it."""

from __future__ import annotations

import signal

from kvroute.config import load
from kvroute.workers.process import WorkerProcess
from kvroute.workers.sockets import bind, claim
from kvroute.workers.staff import Post


async def test_a_worker_from_its_start_to_its_end(replica, tmp_path):
    """It is started, says that it serves, answers questions, and says at its end what it counted."""
    config = load(None, env={}, overrides={"replicas": [{"url": replica.url}], "store.kind": "memory"})
    (public,) = bind(claim("127.0.0.1", 0))
    with public:
        worker = await WorkerProcess.start(Post(1, 0, 0), config, [public], tmp_path, verbose=False)
        try:
            assert (await worker.hear()).serves
            assert await worker.ask("GET", "/health") == (
                200, "application/json; charset=utf-8", b'{"status": "ok"}',
            )  # fmt: skip
            worker.stop()
            assert "kvroute_requests_active" in (await worker.hear()).metrics
            assert await worker.hear() is None
            assert await worker.ended() == 0
        finally:
            worker.kill()


async def test_a_killed_worker_says_nothing_more(replica, tmp_path):
    """Its words end, and its code tells the signal."""
    config = load(None, env={}, overrides={"replicas": [{"url": replica.url}], "store.kind": "memory"})
    (public,) = bind(claim("127.0.0.1", 0))
    with public:
        worker = await WorkerProcess.start(Post(1, 0, 0), config, [public], tmp_path, verbose=False)
        worker.kill()
        assert await worker.hear() is None
        assert await worker.ended() == -signal.SIGKILL
