"""What a supervisor lends to a worker, for tests that are the supervisor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kvroute.config import load
from kvroute.workers.shares import Shares
from kvroute.workers.sockets import bind, claim
from kvroute.workers.words import Assignment
from tests.processes import SimulatedReplica


@contextmanager
def lent(replica: SimulatedReplica, directory: Path, **overrides: Any) -> Iterator[Assignment]:
    """Yield the assignment of a worker that is alone, with its store in memory."""
    given = {"replicas": [{"url": replica.url}], "store.kind": "memory", **overrides}
    (public,), shares = bind(claim("127.0.0.1", 0)), Shares()
    try:
        yield Assignment(
            config=load(None, env={}, overrides=given),
            slot=0,
            sockets=(public.fileno(),),
            counts=shares.counts,
            inbox=shares.inbox(0),
            outboxes=shares.outboxes([]),
            admin=str(directory / "1.sock"),
        )
    finally:
        public.close()
        shares.close()
