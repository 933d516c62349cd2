"""The admin listener: is it well, how well does it route, who are the replicas. On loopback unless told otherwise.

It reads the fleet, the shared account and the counters; it changes draining and empties caches. Further routes are
given to it: explain.py, holds.py and policy.py have theirs.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from kvroute.adapters.shared_account import AccountStore
from kvroute.errors import ReplicaFailed
from kvroute.proxy.admin_site import application, refusal
from kvroute.proxy.sharing import Sharing, wall_clock_s
from kvroute.routing.fleet import Fleet, ReplicaState
from kvroute.routing.hitrate import hit_rate
from kvroute.routing.replica import ReplicaId


class ResetOrder(Struct, forbid_unknown_fields=True):
    """Whose cache to empty."""

    replica: str


class Admin:
    """Answers on the admin listener."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        accounts: AccountStore,
        sharing: Sharing,
        registry: CollectorRegistry,
        describe_index: Callable[[], str],
        knowledge: Callable[[], list[dict[str, Any]]],
        reset: Callable[[ReplicaId], Awaitable[list[ReplicaId]]],
        is_draining: Callable[[], bool],
        more: Iterable[web.RouteDef] = (),
        body_bytes_max: int = 1 << 20,
    ) -> None:
        self._fleet = fleet
        self._accounts = accounts
        self._sharing = sharing
        self._registry = registry
        self._describe_index = describe_index
        self._knowledge = knowledge
        self._reset = reset
        self._is_draining = is_draining
        self._more = tuple(more)
        self._body_bytes_max = body_bytes_max

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = application(self._body_bytes_max)
        app.add_routes(
            [
                web.get("/", self.page),
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/admin/hit-rate", self.hit_rate),
                web.get("/admin/replicas", self.replicas),
                web.get("/admin/index", self.index),
                web.post("/admin/drain", self.drain),
                web.post("/admin/undrain", self.undrain),
                web.post("/admin/reset", self.reset),
                *self._more,
            ]
        )
        return app

    async def page(self, _request: web.Request) -> web.Response:
        """Serve the page that shows all of this to a person."""
        text = files("kvroute.proxy").joinpath("dashboard.html").read_text("utf-8")
        return web.Response(text=text, content_type="text/html")

    async def health(self, _request: web.Request) -> web.Response:
        """Say that this process answers."""
        return web.json_response({"status": "ok"})

    async def ready(self, _request: web.Request) -> web.Response:
        """Say whether requests can be served: a replica is available and this router is not about to stop."""
        available = sum(state.is_available for state in self._fleet.states())
        ready = available > 0 and not self._is_draining()
        body = {"ready": ready, "available_replicas": available, "stopping": self._is_draining()}
        return web.json_response(body, status=200 if ready else 503)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Give the counters in Prometheus' text form."""
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def hit_rate(self, _request: web.Request) -> web.Response:
        """Give seen, reachable, predicted and delivered tokens of the whole deployment."""
        self._sharing.push()
        rows = await self._accounts.read()
        return _json(hit_rate(rows, wall_clock_s()))

    async def replicas(self, _request: web.Request) -> web.Response:
        """List the replicas as this router sees them."""
        return _json({"index": self._describe_index(), "replicas": [describe(state) for state in self._fleet.states()]})

    async def index(self, _request: web.Request) -> web.Response:
        """Say where what is known of each replica's cache comes from, and how right it was of late."""
        return _json({"index": self._describe_index(), "replicas": self._knowledge()})

    async def drain(self, request: web.Request) -> web.Response:
        """Send a replica no new requests; those under way go on."""
        return self._set_draining(request, True)

    async def undrain(self, request: web.Request) -> web.Response:
        """Use a drained replica again."""
        return self._set_draining(request, False)

    async def reset(self, request: web.Request) -> web.Response:
        """Have a replica empty its prefix cache, and forget what it held."""
        try:
            order = msgspec.json.decode(await request.read(), type=ResetOrder)
        except msgspec.DecodeError as error:
            return refusal(400, f'{error}; the body is {{"replica": ID}}', "replica")
        id = ReplicaId(order.replica.rstrip("/"))
        if id not in (known := self._known()):
            return _unknown(id, known)
        try:
            return _json({"reset": await self._reset(id)})
        except ReplicaFailed as error:
            return refusal(502, str(error), "replica")

    def _set_draining(self, request: web.Request, flag: bool) -> web.Response:
        id = ReplicaId(request.query.get("replica", "").rstrip("/"))
        if id not in (known := self._known()):
            return _unknown(id, known)
        self._fleet.set_draining(id, flag)
        return web.json_response({"replica": id, "draining": flag})

    def _known(self) -> list[ReplicaId]:
        return [replica.id for replica in self._fleet.replicas()]


def _unknown(id: ReplicaId, known: list[ReplicaId]) -> web.Response:
    return refusal(
        404, f"`replica` must be one of {', '.join(known) or 'none: no replica is known'}; got {id!r}", "replica"
    )


def _json(value: Any) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


def describe(state: ReplicaState) -> dict[str, Any]:
    """Return a replica's state as JSON says it."""
    replica = state.replica
    return {
        "id": replica.id,
        "url": replica.url,
        "rank": replica.rank,
        "models": [card.name for card in replica.cards],
        "block_size": replica.block_size,
        "capacity_tokens": replica.capacity_tokens,
        "is_healthy": state.is_healthy,
        "is_draining": state.is_draining,
        "is_available": state.is_available,
        "consecutive_failures": state.failures,
        "running": state.running,
        "promised": state.promised + state.others,
        "promised_here": state.promised,
        "load": state.load,
        "rates": state.rates,
    }
