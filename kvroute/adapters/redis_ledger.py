"""What all routers promised to the replicas: each publishes its own row, absolute, and adds up the others'.

A row is replaced as a whole and expires with its router's heartbeat, by Redis' clock; so a router that died is
forgotten in seconds and nothing has to be taken back. A router id must never be used twice: every start has a fresh
one.

`reserve` is for pressure: one script adds up all others' rows and reservations and books only what fits beside what the
asking router says it has itself. (Its own row still counts what ended since it was sent: a conversation whose next turn
follows at once would be refused the room that its last one has just left.) Book locally first, then reserve, and undo
the booking where it is refused: the next published row then covers the reservation.

Beside rows, routers tell each other what happened (`tell`, `heard`): short texts in a bounded stream, which a router
reads from its own start on. Nobody waits for them, and what a slow reader misses is lost.

Without Redis every reservation is granted: the shared ledger improves placement, it must not stop it.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import deque
from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from kvroute.adapters.redis_link import Link, ask
from kvroute.adapters.redis_wire import Argument, Reply
from kvroute.errors import IndexUnavailable
from kvroute.routing.demand import Promise
from kvroute.routing.replica import ReplicaId

COALESCE_S = 0.02
BEAT_S, ALIVE_S = 1.0, 3.0
POLL_S, POLL_ALONE_S = 0.05, 0.5  # alone: nobody else has published
RESERVE_TIMEOUT_S = 0.02
NOTHING = Promise()
TOLD_MAX, TOLD_LIFE_S = 2_000, 60.0  # texts that are kept for the others, and for how long after the last one
READ_MAX = 500  # at once


class LedgerStats(Struct):
    """Plain counters; telemetry reads them."""

    published: int = 0
    reserved: int = 0
    refused: int = 0
    unconfirmed: int = 0  # granted without Redis' word
    routers: int = 1  # alive, this one included


class Ledger(Protocol):
    """Promises of several routers."""

    stats: LedgerStats

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def publish(self, promises: Mapping[ReplicaId, Promise]) -> None:
        """Make this router's promises known: all of them, every time."""

    def others(self) -> dict[ReplicaId, Promise]:
        """Return the sum of what the other live routers promised."""

    def tell(self, text: bytes) -> None:
        """Tell the other routers something, once."""

    def heard(self) -> list[bytes]:
        """Return what others told since the last call, the oldest first."""

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        """Ask for KV tokens of a replica, already booked locally but not yet published; False where they do not fit.

        Args:
            replica: where.
            kv_tokens: what is asked for.
            limit_tokens: what all routers together may have promised there.
            own_tokens: what this one has, these tokens included. Its published row is not asked: it lags.
        """


class MemoryLedger:
    """The ledger of one router alone."""

    def __init__(self) -> None:
        self.stats = LedgerStats()

    async def start(self) -> None:
        """Nothing to start."""

    async def close(self) -> None:
        """Nothing to close."""

    def publish(self, promises: Mapping[ReplicaId, Promise]) -> None:
        """Count it: nobody else wants to know."""
        self.stats.published += 1

    def others(self) -> dict[ReplicaId, Promise]:
        """Return nothing: there is no other router."""
        return {}

    def tell(self, text: bytes) -> None:
        """Do nothing: nobody listens."""

    def heard(self) -> list[bytes]:
        """Return nothing: there is no other router."""
        return []

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        """Grant what fits: nobody else has promised anything."""
        if own_tokens > limit_tokens:
            self.stats.refused += 1
            return False
        self.stats.reserved += 1
        return True


class SharedLedger:
    """The ledger in Redis."""

    def __init__(self, link: Link, *, deployment: str, router_id: str) -> None:
        self.stats = LedgerStats()
        self._link = link
        self._router_id = router_id
        self._prefix = f"{{kvr:v1:{deployment}:ledger}}".encode()
        self._row = b""
        self._epoch = b""
        self._reserved: set[ReplicaId] = set()  # reservations that no sent row covers yet
        self._others: dict[ReplicaId, Promise] = {}
        self._heard: deque[bytes] = deque(maxlen=TOLD_MAX)
        self._last_told = b""  # id of the last text that was read
        self._flush: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Begin heartbeat and poll. The link is its owner's to start and close."""
        self._link.on_up.append(self._send)
        loop = asyncio.get_running_loop()
        self._tasks = [
            loop.create_task(self._beat(), name="kvroute-ledger-beat"),
            loop.create_task(self._poll(), name="kvroute-ledger-poll"),
        ]

    async def close(self) -> None:
        """Stop, and take this router's row out."""
        with contextlib.suppress(ValueError):
            self._link.on_up.remove(self._send)
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._stop_timer()
        if tasks:
            with contextlib.suppress(IndexUnavailable):
                await ask(self._link, "publish", self._prefix, (self._router_id, 0, "", ""), timeout_s=0.2)

    def publish(self, promises: Mapping[ReplicaId, Promise]) -> None:
        """Send the promises with the next flush, at most COALESCE_S away, if they changed."""
        row = encode_row(promises)
        if row == self._row and not self._reserved:
            return
        self._row = row
        if self._flush is None:
            self._flush = asyncio.get_running_loop().call_later(COALESCE_S, self._send)

    def others(self) -> dict[ReplicaId, Promise]:
        """Return the sum of the other live routers' rows, as of the last poll; nothing while Redis is down."""
        return self._others

    def tell(self, text: bytes) -> None:
        """Send a text to the other routers; while Redis is down, to nobody."""
        if self.stats.routers > 1:
            life_ms = int(TOLD_LIFE_S * 1000)
            self._link.run("tell", self._prefix, (self._router_id, text, TOLD_MAX, life_ms), lambda reply: None)

    def heard(self) -> list[bytes]:
        """Return what others told, as of the last poll."""
        texts = list(self._heard)
        self._heard.clear()
        return texts

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        """Reserve in Redis, atomically with all other routers."""
        if self._flush is not None:
            self._send()  # a row from before this booking must not arrive after it and seem to cover it
        self._reserved.add(replica)
        arguments: tuple[Argument, ...] = (
            self._router_id, self._epoch, replica, kv_tokens, limit_tokens, own_tokens,
        )  # fmt: skip
        try:
            reply = await ask(self._link, "reserve", self._prefix, arguments, RESERVE_TIMEOUT_S)
        except IndexUnavailable:
            reply = -1
        if reply == 0:
            self.stats.refused += 1
            return False
        if reply == 1:
            self.stats.reserved += 1
        else:
            self.stats.unconfirmed += 1
            self._send()
        return True

    def _send(self) -> None:
        self._stop_timer()
        covered, self._reserved = self._reserved, set()
        head = (self._router_id, int(ALIVE_S * 1000), secrets.token_hex(8), self._row)
        arguments: tuple[Argument, ...] = (*head, *covered)
        if self._link.run("publish", self._prefix, arguments, self._sent):
            self.stats.published += 1
        else:
            self._reserved |= covered

    def _sent(self, reply: Reply) -> None:
        if isinstance(reply, bytes):
            self._epoch = reply

    def _stop_timer(self) -> None:
        if self._flush is not None:
            self._flush.cancel()
            self._flush = None

    async def _beat(self) -> None:
        while True:
            self._send()
            await asyncio.sleep(BEAT_S)

    async def _poll(self) -> None:
        while True:
            try:
                rows = await ask(self._link, "promises", self._prefix, (self._router_id,))
            except IndexUnavailable:
                rows = []
            with contextlib.suppress(IndexUnavailable):
                last, *texts = await ask(self._link, "told", self._prefix, (self._router_id, self._last_told, READ_MAX))
                self._last_told = last
                self._heard.extend(texts)
            self.stats.routers = len(rows) + 1
            self._others = add_rows(rows)
            await asyncio.sleep(POLL_S if rows else POLL_ALONE_S)


def encode_row(promises: Mapping[ReplicaId, Promise]) -> bytes:
    """Write promises as lines `replica TAB requests prefill_tokens kv_tokens`, each between newlines (reserve.lua)."""
    return "".join(
        f"\n{replica}\t{promise.requests} {promise.prefill_tokens} {promise.kv_tokens}\n"
        for replica, promise in promises.items()
        if promise != NOTHING
    ).encode()


def add_rows(rows: list[bytes]) -> dict[ReplicaId, Promise]:
    """Add up rows of several routers."""
    total: dict[ReplicaId, Promise] = {}
    for row in rows:
        for line in row.decode().split("\n"):
            replica, _, figures = line.partition("\t")
            if figures:
                id = ReplicaId(replica)
                total[id] = total.get(id, NOTHING) + Promise(*map(int, figures.split()))
    return total
