"""The one admin listener of several workers: it asks them, and answers as if they were one router.

Metrics are added up; the hit rates are the shared account's, after every worker has pushed; draining goes to all. What
it does not know is passed on to the worker that has served the longest.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from urllib.parse import urlencode

import aiohttp
import msgspec
from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvroute.proxy import holds, policy
from kvroute.proxy.admin_site import application, error_body
from kvroute.workers.merge import Page, counts, merge, read_page
from kvroute.workers.process import WorkerProcess

Reply = tuple[int, str, bytes]  # status, content type, body
log = logging.getLogger("kvroute.workers")

BODY_BYTES_MAX = 64 << 20  # of what is passed on; a worker may take less
DELIVERIES = ("predicted_tokens", "delivered_tokens", "delivered_unpredicted_tokens")
FAILURES = (aiohttp.ClientError, TimeoutError, OSError)


class Front:
    """Answers on the admin listener.

    Args:
        serving: the workers that take requests, the one that does so for longest first.
        living: all workers that may still count something.
        own: the supervisor's own metrics.
        is_stopping: whether this router is about to stop.
    """

    def __init__(
        self,
        *,
        serving: Callable[[], Sequence[WorkerProcess]],
        living: Callable[[], Sequence[WorkerProcess]],
        own: CollectorRegistry,
        is_stopping: Callable[[], bool],
    ) -> None:
        self._serving = serving
        self._living = living
        self._own = own
        self._is_stopping = is_stopping
        self._retired: Page = []  # what workers counted that are gone
        self._drained: set[str] = set()  # replicas, for workers that come later
        self._policy: dict[str, Any] = {}  # likewise: what was ordered about the policy

    def app(self) -> web.Application:
        """Return the application with its routes."""
        app = application(BODY_BYTES_MAX)
        app.add_routes(
            [
                web.get("/health", self.health),
                web.get("/ready", self.ready),
                web.get("/metrics", self.metrics),
                web.get("/admin/hit-rate", self.hit_rate),
                web.get("/admin/replicas", self.replicas),
                web.post("/admin/drain", self.to_all),
                web.post("/admin/undrain", self.to_all),
                web.post("/admin/policy", self.policy),
                web.get("/admin/holds", self.merged),
                web.get("/admin/index", self.merged),
                web.get("/admin/shadow", self.merged),
                web.route("*", "/{path:.*}", self.to_one),
            ]
        )
        return app

    async def welcome(self, worker: WorkerProcess) -> None:
        """Tell a worker that has just come up what is drained."""
        for replica in self._drained:
            await _try(worker, "POST", f"/admin/drain?{urlencode({'replica': replica})}")
        if self._policy:
            await _try(worker, "POST", "/admin/policy", msgspec.json.encode(self._policy))

    def forget_policy(self) -> None:
        """Let the settings say which policy is followed: they were read again."""
        self._policy = {}

    def retire(self, worker: WorkerProcess, last_words: str) -> None:
        """Keep what a worker counted that is gone: as it said at its end, or as it was last seen."""
        page = read_page(last_words) if last_words else worker.page
        self._retired = merge([self._retired, counts(page)])

    async def health(self, _request: web.Request) -> web.Response:
        """Say that this process answers, and how many workers take requests."""
        return web.json_response({"status": "ok", "workers": len(self._serving())})

    async def ready(self, request: web.Request) -> web.Response:
        """Say whether requests can be served: by one worker at least, and not by one that is about to stop."""
        replies = await self._ask_all(self._serving(), "GET", request.path_qs)
        best = min(replies, key=lambda reply: reply[0], default=_nobody())
        if self._is_stopping():
            body = msgspec.json.decode(best[2]) | {"ready": False, "stopping": True}
            return web.json_response(body, status=503)
        return _response(best)

    async def metrics(self, _request: web.Request) -> web.Response:
        """Give the sums in Prometheus' text form."""
        retired, living = self._retired, tuple(self._living())  # of the same moment: nobody may count in both
        await asyncio.gather(*(_read(worker) for worker in living))
        own = read_page(generate_latest(self._own).decode())
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Pages(merge([*(worker.page for worker in living), own, retired])))
        return web.Response(body=generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def hit_rate(self, request: web.Request) -> web.Response:
        """Give the account's figures, after all others have pushed what they counted."""
        one, *others = self._serving() or (None,)
        await self._ask_all(others, "GET", request.path_qs)
        return _response(await _try(one, "GET", request.path_qs))

    async def replicas(self, request: web.Request) -> web.Response:
        """List the replicas as the longest-serving worker sees them, with what all of them promised."""
        replies = await self._ask_all(self._serving(), "GET", request.path_qs)
        if not replies or replies[0][0] != 200:
            return _response(replies[0] if replies else _nobody())
        one, *others = (msgspec.json.decode(body) for _, _, body in replies)
        add_promises(one["replicas"], [row for other in others for row in other["replicas"]])
        return web.json_response(one)

    async def to_all(self, request: web.Request) -> web.Response:
        """Drain or undrain on every worker, those that come later included."""
        replies = await self._ask_all(self._serving(), "POST", request.path_qs)
        best = min(replies, key=lambda reply: reply[0], default=_nobody())
        replica = request.query.get("replica", "").rstrip("/")
        if best[0] == 200 and request.path == "/admin/drain":
            self._drained.add(replica)
        elif best[0] == 200:
            self._drained.discard(replica)
        return _response(best)

    async def policy(self, request: web.Request) -> web.Response:
        """Switch the policy of every worker, those that come later included."""
        return _response(await self._order(await request.read()))

    async def follow(self, order: dict[str, Any]) -> None:
        """Have every worker follow the policy of new settings."""
        status, _, body = await self._order(msgspec.json.encode(order))
        if status != 200:
            log.error("the policy could not be switched: %s", body.decode(errors="replace"))

    async def _order(self, body: bytes) -> Reply:
        replies = await self._ask_all(self._serving(), "POST", "/admin/policy", body)
        best = max(replies, key=lambda reply: reply[0], default=_nobody())
        if best[0] == 200:
            self._policy |= msgspec.json.decode(body)
        return best

    async def merged(self, request: web.Request) -> web.Response:
        """Put side by side what every worker says of itself."""
        replies = await self._ask_all(self._serving(), "GET", request.path_qs)
        reports = [msgspec.json.decode(body) for status, _, body in replies if status == 200]
        if not reports:
            return _response(replies[0] if replies else _nobody())
        return web.json_response(MERGERS[request.path](reports))

    async def to_one(self, request: web.Request) -> web.Response:
        """Pass a request on to one worker."""
        one = next(iter(self._serving()), None)
        return _response(await _try(one, request.method, request.path_qs, await request.read()))

    async def _ask_all(
        self, workers: Iterable[WorkerProcess | None], method: str, target: str, body: bytes = b""
    ) -> list[Reply]:
        """Return what those said that answered, in order."""
        replies = await asyncio.gather(*(_try(worker, method, target, body) for worker in workers))
        return [reply for reply in replies if reply[0] != 502] or replies[:1]


def add_promises(rows: list[dict[str, Any]], others: Iterable[dict[str, Any]]) -> None:
    """Add to each replica's `promised_here` what other workers promised it."""
    here = {row["id"]: row["promised_here"] for row in rows}
    for other in others:
        if other["id"] in here:
            for name, value in other["promised_here"].items():
                here[other["id"]][name] += value


def known_by_all(reports: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return what workers say of the index as one: of an event stream its owner speaks, deliveries are added up."""
    rows: dict[str, dict[str, Any]] = {}
    names = []
    for report in reports:
        names.append(report["index"])
        for row in report["replicas"]:
            known = rows.get(row["replica"])
            if known is None:
                rows[row["replica"]] = row
                continue
            sums = {name: known[name] + row[name] for name in DELIVERIES}
            sums["distrusted"] = known["distrusted"] or row["distrusted"]
            rows[row["replica"]] = (row if row.get("owner") else known) | sums
    return {"index": names[0], "replicas": list(rows.values())}


MERGERS = {"/admin/holds": holds.merged, "/admin/index": known_by_all, "/admin/shadow": policy.merged}


class _Pages(Collector):
    def __init__(self, page: Page) -> None:
        self._page = page

    def collect(self) -> Iterable[Metric]:
        return self._page


async def _read(worker: WorkerProcess) -> None:
    status, _, body = await _try(worker, "GET", "/metrics")
    if status == 200:
        worker.page = read_page(body.decode())


async def _try(worker: WorkerProcess | None, method: str, target: str, body: bytes = b"") -> Reply:
    if worker is None:
        return _nobody()
    try:
        return await worker.ask(method, target, body)
    except FAILURES as error:
        return _failure(502, f"worker {worker.pid} does not answer: {error!r}")


def _nobody() -> Reply:
    return _failure(503, "no worker serves now")


def _failure(status: int, message: str) -> Reply:
    return status, "application/json", error_body(status, message)


def _response(reply: Reply) -> web.Response:
    status, content_type, body = reply
    return web.Response(status=status, body=body, headers={"Content-Type": content_type})
