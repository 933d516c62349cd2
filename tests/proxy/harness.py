"""A whole pool in one process: simulated replicas on real sockets, and the request path before them.

`async with pool(2) as it:` gives the replicas' URLs, the router's URL, and every part of the router to look into.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random

import aiohttp

from kvroute.adapters.index import MemoryIndex, namespace_of
from kvroute.adapters.tokens import open_reader
from kvroute.adapters.upstream import Upstream, UpstreamSettings
from kvroute.fake.server import build_replica, serve_replica
from kvroute.proxy.catalogue import Catalogue, ModelEntry, ServedModel
from kvroute.proxy.dispatch import Dispatch, DispatchSettings
from kvroute.proxy.handler import Handler, HandlerSettings
from kvroute.proxy.learn import Learner
from kvroute.proxy.listener import Listener
from kvroute.proxy.placing import Placing
from kvroute.proxy.question import Asker
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.tenants import Tenants
from kvroute.routing.account import Account, Row
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.fleet import Fleet
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router
from kvroute.routing.seen import SeenWindow

MODEL = "sim"
BLOCK_SIZE = 16
KV_TOKENS = 65_536


class Ledger:
    """Confirms every booking but those on the replicas named in `full`; remembers what it was asked."""

    def __init__(self) -> None:
        self.full: set[ReplicaId] = set()
        self.asked: list[ReplicaId] = []

    async def reserve(self, replica: ReplicaId, kv_tokens: int, limit_tokens: int, own_tokens: int) -> bool:
        self.asked.append(replica)
        return replica not in self.full


@dataclass
class Pool:
    """What a test looks into."""

    url: str
    replicas: list[str]  # URLs
    session: aiohttp.ClientSession
    fleet: Fleet
    index: MemoryIndex
    ledger: Ledger
    upstream: Upstream
    learner: Learner
    account: Account
    stats: HandlerStats
    catalogue: Catalogue
    changed: asyncio.Event
    rows: list[Row] = field(default_factory=list)

    async def state(self, replica: int) -> dict[str, int]:
        """Ask a replica what its engine is doing."""
        async with self.session.get(f"{self.replicas[replica]}/_state") as answer:
            return await answer.json()

    async def fault(self, replica: int, kind: str, **how: object) -> None:
        """Order a replica to break."""
        async with self.session.post(f"{self.replicas[replica]}/_fault", json={"kind": kind, **how}) as answer:
            assert answer.status == 200, await answer.text()

    async def eventually(self, holds: object, what: str) -> None:
        """Wait until an (async) condition holds; a bound, not a measurement."""
        assert callable(holds)
        for _ in range(500):
            found = holds()
            if await found if asyncio.iscoroutine(found) else found:
                return
            await asyncio.sleep(0.02)
        raise AssertionError(f"not within 10 s: {what}")

    def in_flight(self) -> int:
        """Count the bookings of all replicas."""
        return sum(promise.requests for promise in self.fleet.promises().values())


def chat(text: str = "Tell me about prefix caching.", **fields: object) -> dict[str, object]:
    """Make the body of a small chat."""
    messages = [{"role": "system", "content": "You are a careful helper."}, {"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 8, **fields}


@asynccontextmanager
async def replicas(count: int, **how: object) -> AsyncIterator[list[str]]:
    """Serve simulated replicas; gives their URLs."""
    runners = []
    try:
        for _ in range(count):
            app = build_replica(**{"model": MODEL, "kv_tokens": KV_TOKENS, "speed": 50.0, "faults": True, **how})
            runners.append(await serve_replica(app))
        yield [url for _, url in runners]
    finally:
        for runner, _ in runners:
            await runner.cleanup()


@asynccontextmanager
async def pool(
    count: int = 1,
    *,
    urls: Iterable[str] | None = None,
    dispatch: DispatchSettings | None = None,
    handler: HandlerSettings | None = None,
    upstream: UpstreamSettings | None = None,
    tenants: Tenants | None = None,
    policy: str = "kvroute",
    models: tuple[str, ...] = (MODEL,),
    admission: AdmissionSettings | None = None,
    no_replica_wait_s: float = 0.2,
    kv_tokens: int = KV_TOKENS,
    **how: object,
) -> AsyncIterator[Pool]:
    """Serve the request path before `count` simulated replicas, or before servers that are already there.

    Further arguments go to the simulated replicas.
    """
    if urls is None:
        async with (
            replicas(count, kv_tokens=kv_tokens, **how) as made,
            _router(
                made, dispatch, handler, upstream, tenants, policy, models, admission, no_replica_wait_s, kv_tokens
            ) as it,
        ):
            yield it
    else:
        async with _router(
            list(urls), dispatch, handler, upstream, tenants, policy, models, admission, no_replica_wait_s, kv_tokens
        ) as it:
            yield it


@asynccontextmanager
async def _router(
    urls: list[str],
    dispatch_settings: DispatchSettings | None,
    handler_settings: HandlerSettings | None,
    upstream_settings: UpstreamSettings | None,
    tenants: Tenants | None,
    policy: str,
    models: tuple[str, ...],
    admission: AdmissionSettings | None,
    no_replica_wait_s: float,
    kv_tokens: int,
) -> AsyncIterator[Pool]:
    fleet, index, catalogue, stats, changed = Fleet(), MemoryIndex(), Catalogue(), HandlerStats(), asyncio.Event()
    reader = await open_reader("none", None, models[0], None)
    await reader.start()
    namespace = namespace_of(models[0], BLOCK_SIZE, reader.fingerprint)
    catalogue.replace({name: ServedModel(ModelEntry(name, BLOCK_SIZE, namespace, reader)) for name in models})
    for url in urls:
        card = tuple(ModelCard(name, 32_768) for name in models)
        replica = Replica(id=ReplicaId(url), url=url, cards=card, block_size=BLOCK_SIZE, capacity_tokens=kv_tokens)
        fleet.join(replica, 0.0)
        index.join(replica.id, namespace, kv_tokens // BLOCK_SIZE)
    ledger, account, learner, upstream = Ledger(), Account(), Learner(index, stats), Upstream(upstream_settings)
    asker = Asker(index, SeenWindow(), stats)
    placing = Placing(
        router=Router(fleet, policy, Random(0), admission=admission),
        ledger=ledger,
        stats=stats,
        fleet_changed=changed,
        no_replica_wait_s=no_replica_wait_s,
        again=asker.again,
    )
    door = Handler(
        asker=asker,
        placing=placing,
        dispatch=Dispatch(
            placing=placing,
            upstream=upstream,
            index=index,
            account=account,
            learner=learner,
            stats=stats,
            settings=dispatch_settings or DispatchSettings(),
        ),
        catalogue=catalogue,
        cards=lambda: [card for replica in fleet.replicas() for card in replica.cards],
        tenants=tenants or Tenants(),
        stats=stats,
        settings=handler_settings or HandlerSettings(),
    )
    await upstream.start()
    await learner.start()
    listener = Listener(door.handle)
    try:
        url = f"http://127.0.0.1:{await listener.start('127.0.0.1', 0)}"
        async with aiohttp.ClientSession(auto_decompress=False) as session:
            yield Pool(url, urls, session, fleet, index, ledger, upstream, learner, account, stats, catalogue, changed)
    finally:
        await listener.close()
        door.close()
        await learner.close()
        await upstream.close()
        await reader.close()


def closed_port() -> int:
    """Return a port on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
