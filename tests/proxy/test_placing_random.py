"""Every request that waits ends, whatever replicas, other routers and the store do, and when its client leaves.

Time is jumped over: a run of minutes takes milliseconds.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from heapq import heappop
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import KvrouteError
from kvroute.proxy.placing import Placing
from kvroute.proxy.question import Question
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Outcome, Promise, Usage
from kvroute.routing.lease import Lease
from kvroute.routing.news import News
from kvroute.routing.replica import Load, ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, fleet_of, replica

HOLD_S, NO_REPLICA_S, ANSWER_S = 20.0, 5.0, 3.0
CAPACITY_TOKENS = 10_000


class JumpingLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock goes on to what is due next when there is nothing to do."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        due: list[Any] = self._scheduled  # type: ignore[attr-defined]
        while due and due[0].cancelled():
            heappop(due)._scheduled = False
        if not self._ready:  # type: ignore[attr-defined]
            assert due, "everybody waits, and nothing will ever happen"
            self.now_s = max(self.now_s, due[0].when())
        super()._run_once()  # type: ignore[misc]


class Deployment:
    """A router's placing, with all around it that may fail."""

    def __init__(self, loop: JumpingLoop, chance: Random) -> None:
        self.loop, self.chance = loop, chance
        self.fleet = fleet_of(*(replica(name, capacity_tokens=CAPACITY_TOKENS) for name in ("r0", "r1")))
        self.router = Router(self.fleet, rng=Random(7), admission=AdmissionSettings(hold_s=HOLD_S, holds_max=40))
        self.changed = asyncio.Event()
        self.store_is_down = False
        self.heard: list[News] = []
        self.placing = Placing(
            router=self.router, ledger=self, stats=HandlerStats(), fleet_changed=self.changed,
            no_replica_wait_s=NO_REPLICA_S, again=self.again, clock=loop.time,
        )  # fmt: skip
        self.requests: list[asyncio.Task[None]] = []

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        """Answer as a store does that is shared with others: late, or with a refusal."""
        await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.5)))
        return self.store_is_down or self.chance.random() < 0.6

    async def again(self, question: Question) -> Question:
        """Look up once more, as long as there is a store."""
        await asyncio.sleep(self.chance.choice((0.0, 0.01, 0.5)))
        if self.store_is_down:
            raise ConnectionResetError
        return question

    async def request(self, root: int, tokens: int) -> None:
        """Ask, wait and run, as dispatching does: a replica that breaks is avoided."""
        demand = ask(tokens, chain=chain(tokens // 16, root=root), tenant="ab"[root % 2], priority=root // 6)
        held = {ReplicaId("r0"): tokens} if root == 3 else {}
        question: Any = Question(None, None, (), demand, held, {}, None, True, 0)  # type: ignore[arg-type]
        avoid: set[ReplicaId] = set()
        for _ in range(2):
            question, lease = await self.placing.place(question, avoid, 4 * tokens)
            with lease:
                self.placing.changed()
                if await self.ran(lease, tokens):
                    break
                avoid.add(lease.replica.id)
        self.placing.changed()

    async def ran(self, lease: Lease, tokens: int) -> bool:
        await asyncio.sleep(self.chance.random() * ANSWER_S)
        lease.began(self.loop.time())
        self.placing.changed()
        await asyncio.sleep(self.chance.random() * ANSWER_S)
        is_well = self.chance.random() < 0.8
        outcome = Outcome.DONE if is_well else Outcome.FAILED
        lease.finish(outcome, self.loop.time(), Usage(tokens, 100, 0) if is_well else None)
        return is_well

    def happen(self, what: str, which: int, tokens: int) -> None:
        """Let one thing happen."""
        fleet, now_s, id = self.fleet, self.loop.time(), ReplicaId(f"r{which % 2}")
        if what == "ask":
            self.requests.append(self.loop.create_task(self.asked(which, tokens)))
        elif what == "leave" and self.requests:
            self.requests[which % len(self.requests)].cancel()
        elif what in ("down", "up"):
            fleet.set_health(id, what == "up")
        elif what == "gone":
            fleet.leave(id)
        elif what == "join":
            fleet.join(replica(id, capacity_tokens=CAPACITY_TOKENS), now_s)
        elif what == "report":
            fleet.report(id, Load(running=which, kv_used_fraction=tokens / CAPACITY_TOKENS, preemptions=which), now_s)
        elif what == "others":
            fleet.set_others({id: Promise(which, tokens, tokens)} if which else {})
        elif what == "store":
            self.store_is_down = not self.store_is_down
        elif what == "tell":
            self.heard += self.router.news()
            news = self.heard[which % len(self.heard) :] if self.heard else []
            self.router.hear([self.from_elsewhere(one, which) for one in news], now_s)
        self.placing.changed()
        self.changed.set()

    def from_elsewhere(self, news: News, which: int) -> News:
        """Return what another router may say of a conversation like one here: whose end it perhaps never tells."""
        return News(*[getattr(news, name) for name in News.__struct_fields__[:-2]], f"r{which % 2}", 50.0)

    async def asked(self, root: int, tokens: int) -> None:
        with suppress(KvrouteError):
            await self.request(root, tokens)


happenings = st.tuples(
    st.sampled_from(["ask"] * 12 + ["leave", "down", "up", "gone", "join", "report", "others", "store", "tell"]),
    st.integers(0, 9),
    st.integers(500, 7_000),
    st.sampled_from([0.0, 0.0, 0.0, 0.1, 1.0, 4.0]),
)


@settings(deadline=None, max_examples=80)
@given(st.lists(happenings, min_size=20, max_size=80), st.integers(0, 1_000))
def test_every_request_that_waits_ends(what: list[tuple[str, int, int, float]], seed: int):
    """It runs, is refused, or its client has left: by its bound at the latest, and nothing of it is left behind."""
    loop = JumpingLoop()

    async def play() -> None:
        it = Deployment(loop, Random(seed))
        for kind, which, tokens, pause_s in what:
            it.happen(kind, which, tokens)
            await asyncio.sleep(pause_s)
        # attempts x (the wait for a replica, a hold, reservations of both replicas, an answer)
        await asyncio.sleep(2 * (NO_REPLICA_S + HOLD_S + 3 * 0.5 + 2 * ANSWER_S) + 5.0)
        assert [task for task in it.requests if not task.done()] == []
        await asyncio.gather(*it.requests, return_exceptions=True)
        failed = [task.exception() for task in it.requests if not task.cancelled() and task.exception()]
        assert failed == []
        admission = it.router.admission
        assert admission is not None
        assert (len(admission.waiting), admission.waiting.size_bytes, len(it.placing._held)) == (0, 0, 0)
        assert not any(promise.requests for promise in it.fleet.promises().values())

    try:
        loop.run_until_complete(play())
    finally:
        loop.close()
