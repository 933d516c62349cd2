"""Keeps this router's ledger and account in step with the other routers of its deployment.

Two loops, a pure step and a sleep each: promises are published and the others' taken in, and so is what happened to
conversations; counts are pushed.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

import msgspec

from kvroute.adapters.redis_ledger import Ledger
from kvroute.adapters.shared_account import AccountStore
from kvroute.routing.account import Account
from kvroute.routing.fleet import Fleet
from kvroute.routing.news import News
from kvroute.routing.router import Router

BUSY_S = 0.05  # between two exchanges of promises while anything is promised, here or elsewhere
IDLE_S = 0.25  # and while nothing is: waking up costs more than the step
ACCOUNT_EVERY_S = 0.5


class Sharing:
    """Owns the two loops."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        router: Router,
        ledger: Ledger,
        account: Account,
        accounts: AccountStore,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fleet = fleet
        self._router = router
        self._clock = clock
        self._ledger = ledger
        self._account = account
        self._accounts = accounts
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the loops."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._share_ledger(), name="share ledger"),
            loop.create_task(self._share_account(), name="share account"),
        ]

    async def close(self) -> None:
        """Stop the loops; what was counted until now is pushed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.push()

    def exchange(self) -> bool:
        """Publish what this router promised and take in what the others did; return whether there is anything."""
        promises, others = self._fleet.promises(), self._ledger.others()
        self._ledger.publish(promises)
        self._fleet.set_others(others)
        self._router.set_alone(self._ledger.stats.routers <= 1)
        if news := self._router.news():
            self._ledger.tell(msgspec.msgpack.encode(news))
        for text in self._ledger.heard():
            with contextlib.suppress(msgspec.DecodeError):  # of a router of another version
                self._router.hear(msgspec.msgpack.decode(text, type=list[News]), self._clock())
        return any(promise.requests for ledger in (promises, others) for promise in ledger.values())

    def push(self) -> None:
        """Hand the counts since the last push to the shared account."""
        if rows := self._account.drain():
            self._accounts.push(rows)

    async def _share_ledger(self) -> None:
        while True:
            is_busy = self.exchange()
            await asyncio.sleep(BUSY_S if is_busy else IDLE_S)

    async def _share_account(self) -> None:
        while True:
            self.push()
            await asyncio.sleep(ACCOUNT_EVERY_S)


def wall_clock_s() -> float:
    """Return Unix time: the account's buckets are shared, so they cannot be on a router's own clock."""
    return time.time()
