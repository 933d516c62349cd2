"""Keeps this router's ledger and account in step with the other routers of its deployment.

Two loops, a pure step and a sleep each: promises are published and the others' taken in; counts are pushed.
"""

from __future__ import annotations

import asyncio
import time

from kvroute.adapters.redis_ledger import Ledger
from kvroute.adapters.shared_account import AccountStore
from kvroute.routing.account import Account
from kvroute.routing.fleet import Fleet

LEDGER_EVERY_S = 0.025
ACCOUNT_EVERY_S = 0.5


class Sharing:
    """Owns the two loops."""

    def __init__(self, *, fleet: Fleet, ledger: Ledger, account: Account, accounts: AccountStore) -> None:
        self._fleet = fleet
        self._ledger = ledger
        self._account = account
        self._accounts = accounts
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the loops."""
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._every(LEDGER_EVERY_S, self.exchange), name="share ledger"),
            loop.create_task(self._every(ACCOUNT_EVERY_S, self.push), name="share account"),
        ]

    async def close(self) -> None:
        """Stop the loops; what was counted until now is pushed."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.push()

    def exchange(self) -> None:
        """Publish what this router promised and take in what the others did."""
        self._ledger.publish(self._fleet.promises())
        self._fleet.set_others(self._ledger.others())

    def push(self) -> None:
        """Hand the counts since the last push to the shared account."""
        if rows := self._account.drain():
            self._accounts.push(rows)

    async def _every(self, interval_s: float, step: object) -> None:
        assert callable(step)
        while True:
            step()
            await asyncio.sleep(interval_s)


def wall_clock_s() -> float:
    """Return Unix time: the account's buckets are shared, so they cannot be on a router's own clock."""
    return time.time()
