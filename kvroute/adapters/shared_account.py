"""The account of all routers: sums by bucket and field, so that every router answers the same hit rates.

Rows are deltas. Each batch has a number, and Redis counts a batch of a router once, so a batch whose fate is unknown is
simply sent again. A Redis that came back empty gets everything again that this router ever counted and still keeps.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import Protocol

from kvroute.adapters.redis_link import Link, ask
from kvroute.adapters.redis_wire import Argument
from kvroute.errors import IndexUnavailable

Row = tuple[int, str, int]  # bucket, field, delta or sum

PUSH_S = 0.25
LOOK_EVERY = 4  # pushes: a Redis that came back empty is noticed within a second, by routers without traffic too
BATCH_ROWS = 500
KEEP_ROWS_MAX = 200_000


class AccountStore(Protocol):
    """Sums of several routers."""

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def push(self, rows: Iterable[Row]) -> None:
        """Add deltas."""

    async def read(self) -> list[Row]:
        """Return the sums of all live buckets."""


class MemoryAccount:
    """The sums of one router alone, kept until their bucket's life is over.

    Args:
        life_s: seconds after its number for which a bucket is of interest; None = for ever.
        now_wall_s: Unix time.
    """

    def __init__(self, life_s: Callable[[int], int | None], now_wall_s: Callable[[], float] = time.time) -> None:
        self.dropped_rows = 0
        self._life_s = life_s
        self._now_wall_s = now_wall_s
        self._sums: Counter[tuple[int, str]] = Counter()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def push(self, rows: Iterable[Row]) -> None:
        """Add deltas; past the bound, new fields are dropped and counted."""
        for bucket, field, delta in rows:
            if len(self._sums) >= KEEP_ROWS_MAX:
                self._forget_the_dead()
            if len(self._sums) < KEEP_ROWS_MAX or (bucket, field) in self._sums:
                self._sums[bucket, field] += delta
            else:
                self.dropped_rows += 1

    async def read(self) -> list[Row]:
        """Return the sums of all live buckets."""
        return self.rows()

    def rows(self) -> list[Row]:
        """The same, without waiting."""
        self._forget_the_dead()
        return [(bucket, field, total) for (bucket, field), total in self._sums.items()]

    def _forget_the_dead(self) -> None:
        now_s = self._now_wall_s()
        dead = {bucket for bucket, _ in self._sums if (life := self._life_s(bucket)) and bucket + life <= now_s}
        if dead:
            self._sums = Counter({key: total for key, total in self._sums.items() if key[0] not in dead})


class SharedAccount:
    """The sums in Redis, with this router's own beside them for when Redis is down or came back empty."""

    def __init__(
        self,
        link: Link,
        *,
        deployment: str,
        router_id: str,
        life_s: Callable[[int], int | None],
        now_wall_s: Callable[[], float] = time.time,
    ) -> None:
        self.own = MemoryAccount(life_s, now_wall_s)
        self._life_s = life_s
        self._link = link
        self._router_id = router_id
        self._prefix = f"{{kvr:v1:{deployment}:account}}".encode()
        self._unsent: Counter[tuple[int, str]] = Counter()
        self._batch: dict[tuple[int, str], int] = {}  # sent, fate unknown
        self._batch_number = 0
        self._epoch = b""
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to push. The link is its owner's to start and close."""
        self._task = asyncio.get_running_loop().create_task(self._run(), name="kvroute-account")

    async def close(self) -> None:
        """Stop, after one last push."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            with contextlib.suppress(IndexUnavailable):
                await self._push_all(timeout_s=0.2)

    def push(self, rows: Iterable[Row]) -> None:
        """Add deltas; they reach Redis with the next batch."""
        rows = list(rows)
        self.own.push(rows)
        for bucket, field, delta in rows:
            if len(self._unsent) < KEEP_ROWS_MAX:
                self._unsent[bucket, field] += delta

    async def read(self) -> list[Row]:
        """Return the sums of all routers, or this router's own when Redis does not answer."""
        try:
            await self._push_all()
            buckets = await ask(self._link, "counts", self._prefix, ())
        except IndexUnavailable:
            return self.own.rows()
        return [
            (int(bucket), sums[i].decode(), int(sums[i + 1]))
            for bucket, sums in buckets
            for i in range(0, len(sums), 2)
        ]

    async def _run(self) -> None:
        for turn in count():
            await asyncio.sleep(PUSH_S)
            with contextlib.suppress(IndexUnavailable):
                await self._push_all(look=turn % LOOK_EVERY == 0)

    async def _push_all(self, timeout_s: float = 1.0, look: bool = False) -> None:
        """Push what is unsent; `look` whether Redis still has what was sent, even if there is nothing to push."""
        while look or self._batch or self._unsent:
            look = False
            if not self._batch and self._unsent:
                self._batch = dict(islice(self._unsent.items(), BATCH_ROWS))
                self._batch_number += 1
                for key in self._batch:
                    del self._unsent[key]
            number = self._batch_number
            epoch = await ask(self._link, "count", self._prefix, self._arguments(), timeout_s)
            if epoch != self._epoch:
                self._epoch = epoch
                self._batch = {}
                self._unsent = Counter({(bucket, field): total for bucket, field, total in self.own.rows()})
            elif number == self._batch_number:
                self._batch = {}

    def _arguments(self) -> tuple[Argument, ...]:
        rows = ((bucket, self._life_s(bucket) or 0, field, delta) for (bucket, field), delta in self._batch.items())
        head = (self._epoch, secrets.token_hex(8), self._router_id, self._batch_number)
        return (*head, *(part for row in rows for part in row))
