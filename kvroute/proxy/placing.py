"""A lease for every request: at once, after a hold, or when some replica is well again.

Three waits end here. The router may *hold* a request until memory fits: it names the holds that may go, each of which
is then looked up again and placed by what replicas hold by now. A *reservation* in the shared ledger may be
refused because another router was faster; then the request is placed again. And where *no replica* is available, the
request waits for a change of the fleet. Each wait has a bound, and a client that leaves ends it at once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Set
from itertools import takewhile
from typing import Protocol

from msgspec import Struct

from kvroute.errors import KvrouteError, NoReplica, Overloaded
from kvroute.proxy.question import Question
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ReplicaId
from kvroute.routing.router import Router

log = logging.getLogger("kvroute.placing")

LOOK_AGAIN_S = 0.5  # while no replica is available or requests are held, besides every change that is told


class Reserve(Protocol):
    """The part of the shared ledger that confirms a booking."""

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        """Say whether the tokens fit beside what all routers promised."""


class _Held(Struct, eq=False):
    """A request that waits for its lease."""

    hold: Hold
    question: Question  # as it was looked up last
    avoid: Set[ReplicaId]
    lease: asyncio.Future[Lease]


class Placing:
    """Turns questions into leases. Bounded by the router's own bounds on what is held."""

    def __init__(
        self,
        *,
        router: Router,
        ledger: Reserve,
        stats: HandlerStats,
        fleet_changed: asyncio.Event,
        no_replica_wait_s: float,
        again: Callable[[Question], Awaitable[Question]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._router = router
        self._ledger = ledger
        self._stats = stats
        self._fleet_changed = fleet_changed
        self._no_replica_wait_s = no_replica_wait_s
        self._again = again
        self._clock = clock
        self._held: dict[int, _Held] = {}  # by the hold's number
        self._is_looking = False  # a look is due in this turn of the event loop
        self._tick: asyncio.TimerHandle | None = None
        self._going: set[asyncio.Task[None]] = set()  # one for each hold that may go, while it is looked up

    async def place(self, question: Question, avoid: Set[ReplicaId], size_bytes: int) -> tuple[Question, Lease]:
        """Book a place; return it with the question, which was looked up again if it was held.

        Args:
            question: the request.
            avoid: replicas that have failed it already.
            size_bytes: what keeping the request costs while it is held.

        Raises:
            BadRequest: no replica could ever serve it.
            NoReplica: none became available in time; at once where some have failed it.
            Overloaded: too much is held, or it was held for too long.
        """
        until_s = None
        while True:
            now_s = self._clock()
            try:
                found = self._admit(question, avoid, size_bytes, now_s)
                if isinstance(found, Lease):
                    lease = found
                else:
                    question, lease = await self._held_until_placed(found, question, avoid)
                if lease.reserve_tokens:
                    lease = await self._confirmed(question, avoid, lease)
                return question, lease
            except NoReplica:
                until_s = until_s or now_s + self._no_replica_wait_s
                left_s = until_s - self._clock()
                if avoid or left_s <= 0:
                    raise
            await self._wait_for_the_fleet(left_s)

    def _admit(self, question: Question, avoid: Set[ReplicaId], size_bytes: int, now_s: float) -> Lease | Hold:
        try:
            return self._router.admit(
                question.demand, question.hits, now_s, avoid, stored=question.stored, size_bytes=size_bytes
            )
        except Overloaded:
            self._stats.holds.refused += 1
            raise

    def changed(self) -> None:
        """Note that a lease has begun or ended: something that is held may go now."""
        if self._held and not self._is_looking:
            self._is_looking = True
            asyncio.get_running_loop().call_soon(self._look)

    async def wait_until(self, ready: Callable[[], bool]) -> None:
        """Wait until the pool is as it should be, or the time for such waits is over."""
        until_s = self._clock() + self._no_replica_wait_s
        while not ready() and (left_s := until_s - self._clock()) > 0:
            await self._wait_for_the_fleet(left_s)

    async def _wait_for_the_fleet(self, at_most_s: float) -> None:
        self._stats.held += 1
        try:
            async with asyncio.timeout(min(at_most_s, LOOK_AGAIN_S)):
                await self._fleet_changed.wait()
            self._fleet_changed.clear()
        except TimeoutError:
            pass
        finally:
            self._stats.held -= 1

    async def _held_until_placed(self, hold: Hold, question: Question, avoid: Set[ReplicaId]) -> tuple[Question, Lease]:
        loop = asyncio.get_running_loop()
        held = self._held[hold.number] = _Held(hold, question, avoid, loop.create_future())
        outcome = "left"
        self._stats.held += 1
        self._stats.holds.begin()
        if self._tick is None:
            self._tick = loop.call_later(LOOK_AGAIN_S, self._look)
        try:
            lease = await held.lease
            outcome = "placed"
            return held.question, lease
        except BaseException as error:
            if isinstance(error, KvrouteError):
                outcome = "expired" if isinstance(error, Overloaded) else "failed"
            if not held.lease.cancelled() and held.lease.done() and held.lease.exception() is None:
                held.lease.result().refuse(self._clock())  # booked in the moment in which the client left
            raise
        finally:
            self._stats.held -= 1
            self._stats.holds.end(outcome, self._clock() - hold.since_s)
            if self._held.pop(hold.number, None) is not None:
                self._router.drop(hold, self._clock())
                self.changed()

    def _look(self) -> None:
        """Place what may go, and end what has waited for too long."""
        self._is_looking = False
        now_s = self._clock()
        for held in list(takewhile(lambda held: held.hold.until_s <= now_s, self._held.values())):  # oldest first
            self._try(held, now_s)
        for hold in self._router.released(now_s):
            if (waiting := self._held.get(hold.number)) is not None:
                task = asyncio.get_running_loop().create_task(self._go(waiting), name="place a held request")
                self._going.add(task)
                task.add_done_callback(self._going.discard)
        if self._tick is not None:
            self._tick.cancel()
        loop = asyncio.get_running_loop()
        self._tick = loop.call_later(LOOK_AGAIN_S, self._look) if self._held else None

    async def _go(self, held: _Held) -> None:
        """Place a request that may go, by what replicas hold now."""
        try:
            held.question = await self._again(held.question)
        except Exception:  # the border: what was known when it came is still a guess
            log.exception("a held request could not be looked up again")
        number = held.hold.number
        if self._held.get(number) is held:
            self._try(held, self._clock())
            if number not in self._held:  # whoever is next may go now
                self.changed()

    def _try(self, held: _Held, now_s: float) -> None:
        question, hold = held.question, held.hold
        try:
            found = self._router.admit(
                question.demand, question.hits, now_s, held.avoid, hold=hold, stored=question.stored
            )
        except KvrouteError as error:
            del self._held[hold.number]
            self._router.drop(hold, now_s)
            held.lease.set_exception(error)
            return
        if not isinstance(found, Lease):
            return
        del self._held[hold.number]
        if held.lease.done():  # the client has left
            found.refuse(now_s)
        else:
            held.lease.set_result(found)

    async def _confirmed(self, question: Question, avoid: Set[ReplicaId], lease: Lease) -> Lease:
        """Have a booking confirmed where memory is tight; where another router was faster, choose again."""
        refused: set[ReplicaId] = set()
        while lease.reserve_tokens and not await self._is_confirmed(lease):
            refused.add(lease.replica.id)
            self._stats.refused_reservations += 1
            try:
                lease = self._placed(question, avoid | refused)
            except NoReplica:
                return self._placed(question, avoid)
        return lease

    def _placed(self, question: Question, avoid: Set[ReplicaId]) -> Lease:
        return self._router.place(question.demand, question.hits, self._clock(), avoid, question.stored)

    async def _is_confirmed(self, lease: Lease) -> bool:
        confirmed = False
        try:
            limits = (lease.reserve_limit_tokens, lease.promised_tokens)
            confirmed = await self._ledger.reserve(lease.replica.id, lease.reserve_tokens, *limits)
        finally:
            if not confirmed:
                lease.refuse(self._clock())
        return confirmed
