"""The process that the user starts where there are several workers: it owns what they share, and keeps them staffed.

That is the public sockets, the admin listener, the embedded server and the settings. It takes no request. Who is to be
started and stopped is decided in staff.py; here orders become processes, and what processes do becomes events.

SIGTERM and SIGINT end all of it once requests have ended, a second one at once. SIGHUP reads the settings again: new
workers start beside the old ones, and the old ones are asked to end when the new ones serve. Where only the policy is
another one, the workers that are there go on with it.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import signal
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from socket import socket
from typing import Any

import msgspec
from aiohttp import web
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute.adapters.embedded import EmbeddedServer, socket_directory
from kvroute.config import Config
from kvroute.errors import ConfigError
from kvroute.proxy.address import cannot_listen, url_of
from kvroute.proxy.admin_site import runner_of
from kvroute.workers.cores import workers_for
from kvroute.workers.front import Front
from kvroute.workers.process import WorkerProcess
from kvroute.workers.shares import Shares
from kvroute.workers.sockets import BACKLOG, Address, bind, claim
from kvroute.workers.staff import Post, Staff
from kvroute.workers.words import Assignment

log = logging.getLogger("kvroute.workers")

STARTING_S = 0.05  # between two looks at a worker that is to end and has not begun
KILL_AFTER_S = 10.0  # beyond the time for requests to end


class Supervisor:
    """Several workers on one port.

    Args:
        load: reads the settings; called again for each reload. Raises ConfigError.
        verbose: whether workers log details.
    """

    def __init__(self, load: Callable[[], Config], *, verbose: bool = False) -> None:
        self._load = load
        self._verbose = verbose
        config = load()
        self._first = config  # what no reload can change is taken from here
        self._configs = {0: config}  # of each generation
        self._staff = Staff(workers_for(config))
        self._workers: dict[int, WorkerProcess] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._sockets: dict[int, list[socket]] = {}  # of each slot
        self._addresses = claim_public(config)
        self._shares = Shares()
        self._store_url: str | None = config.store.url
        self._server: EmbeddedServer | None = None
        self._news = asyncio.Event()
        self._trouble = ""  # why the first workers did not come up
        self._stop_signals = 0
        self._wants_reload = False
        self._errand: asyncio.Task[None] | None = None  # kept, or it might be collected before it is over
        self._front = Front(
            serving=lambda: self._known(self._staff.serving()),
            living=lambda: tuple(self._workers.values()),
            own=self._own_metrics(),
            is_stopping=lambda: self._stop_signals > 0,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT; print one line with the addresses once requests are taken.

        Raises:
            ConfigError: a setting cannot work.
        """
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_stop)
        loop.add_signal_handler(signal.SIGHUP, self._on_reload)
        async with AsyncExitStack() as stack:
            self._directory = socket_directory(f"{1 << 63}.sock")  # named by numbers that never repeat
            stack.callback(shutil.rmtree, self._directory, ignore_errors=True)
            stack.callback(self._shares.close)
            await self._open_store(stack)
            admin_url = await self._listen_admin(stack)
            stack.push_async_callback(self._dismiss)
            await self._keep_staffed(f"kvroute serving on {self._public_url()}, admin on {admin_url}")

    def _public_url(self) -> str:
        is_tls = self._first.proxy.tls_certificate is not None
        return url_of(self._first.listen.host, self._addresses[0][1][1], is_tls=is_tls)

    async def _keep_staffed(self, announcement: str) -> None:
        loop, announced = asyncio.get_running_loop(), False
        while not self._stop_signals:
            self._news.clear()
            if self._wants_reload and announced:
                self._wants_reload = False
                self._reload()
            orders = self._staff.step(loop.time())
            for id in orders.stop:
                self._stop(id)
            for post in orders.start:
                self._start(post)
            if self._staff.current is None and self._staff.trial is None:
                raise ConfigError(self._trouble)
            if not announced and self._staff.current is not None:
                announced = True
                log.info("%s workers serve", len(self._staff.serving()))
                print(announcement, flush=True)
            await _wait(self._news, None if orders.look_again_s is None else orders.look_again_s - loop.time())

    # Workers

    def _start(self, post: Post) -> None:
        self._tasks[post.id] = asyncio.get_running_loop().create_task(self._mind(post), name=f"worker {post.id}")

    async def _mind(self, post: Post) -> None:
        """Start a worker and listen to it until it is gone."""
        words, trouble, worker = "", "", None
        try:
            worker = await WorkerProcess.start(post, self._assignment(post), verbose=self._verbose)
            self._workers[post.id] = worker
            while said := await worker.hear():
                words, trouble = said.metrics, said.error
                if said.serves:
                    await self._front.welcome(worker)
                    self._served(post)
                elif said.stops:
                    self._staff.leaves(post.id)
                    self._left(post)
            trouble = trouble or f"worker {worker.pid} ended with code {await worker.ended()}"
        except OSError as error:
            trouble = f"`workers`: no process can be started: {error}"
        finally:
            if worker is not None:
                worker.kill()  # in vain, unless this was our own mistake
            self._gone(post, worker, words, trouble)

    def _served(self, post: Post) -> None:
        was_trial = self._staff.trial
        self._staff.served(post.id, asyncio.get_running_loop().time())
        if was_trial is not None and self._staff.trial is None:
            self._configs = {was_trial: self._configs[was_trial]}
            self._close_sockets(workers_for(self._configs[was_trial]))
            if was_trial:
                log.info("the new settings are in force")
        self._news.set()

    def _gone(self, post: Post, worker: WorkerProcess | None, words: str, trouble: str) -> None:
        self._workers.pop(post.id, None)
        self._tasks.pop(post.id, None)
        if worker is not None:
            self._front.retire(worker, words)
        self._left(post)
        was_trial = self._staff.trial
        if not self._staff.ended(post.id, asyncio.get_running_loop().time()):
            pass
        elif was_trial is None or self._staff.trial is not None:
            log.warning("%s; it is replaced", trouble)
        elif self._staff.current is None:
            self._trouble = trouble
        else:
            log.error("the new settings are not used: %s", trouble)
        self._news.set()

    def _left(self, post: Post) -> None:
        """Have a slot count as empty where nobody else is in it."""
        serving = self._known(self._staff.serving())
        if not any(other.post.slot == post.slot and other.post.id != post.id for other in serving):
            self._shares.leave(post.slot)
        self._news.set()

    def _stop(self, id: int) -> None:
        """Ask a worker to end, and make it end where it takes too long."""
        task, worker, loop = self._tasks.get(id), self._workers.get(id), asyncio.get_running_loop()
        if task is None:
            return
        if worker is None:  # it is being started
            loop.call_later(STARTING_S, self._stop, id)
            return
        worker.stop()
        timer = loop.call_later(worker.config.drain_timeout_s + KILL_AFTER_S, worker.kill)
        task.add_done_callback(lambda task: timer.cancel())

    async def _dismiss(self) -> None:
        """Ask all workers to end and wait until they have."""
        for slot in self._sockets:
            self._shares.leave(slot)  # before anybody goes: nobody would take what he is given then
        self._close_sockets()  # while one is open here, connections would wait in it for nobody
        self._staff.dismiss()
        for id in self._staff.step(asyncio.get_running_loop().time()).stop:
            self._stop(id)
        while self._tasks:
            if self._stop_signals > 1:
                for worker in self._workers.values():
                    worker.kill()
            self._news.clear()
            await _wait(self._news, None)

    def _known(self, ids: Iterable[int]) -> list[WorkerProcess]:
        return [self._workers[id] for id in ids if id in self._workers]

    # Signals

    def _on_stop(self) -> None:
        self._stop_signals += 1
        self._news.set()

    def _on_reload(self) -> None:
        self._wants_reload = True
        self._news.set()

    def _reload(self) -> None:
        try:
            config = self._load()
            check_reload(self._first, config)
            count = workers_for(config)
        except ConfigError as error:
            log.error("the new settings are not used: %s", error)
            return
        current, trial = self._staff.current, self._staff.trial
        if current is not None and trial is None and (order := policy_only(self._configs[current], config)):
            log.info("the settings were read again; the workers go on with another policy: %s", order)
            self._configs[current] = config
            self._errand = asyncio.get_running_loop().create_task(self._front.follow(order), name="switch policy")
            return
        log.info("the settings were read again; %s new workers start", count)
        self._front.forget_policy()
        self._configs[self._staff.reload(count)] = config

    # What they share

    async def _open_store(self, stack: AsyncExitStack) -> None:
        if self._store_url is None and self._first.store.kind == "redis":
            self._server = EmbeddedServer()
            await self._server.start()
            stack.push_async_callback(self._server.close)
            self._store_url = self._server.url

    def _assignment(self, post: Post) -> Assignment:
        config, shares = self._configs[post.generation], self._shares
        store = msgspec.structs.replace(config.store, url=self._store_url)
        return Assignment(
            config=msgspec.structs.replace(config, store=store),
            slot=post.slot,
            sockets=tuple(each.fileno() for each in self._sockets_of(post.slot)),
            counts=shares.counts,
            inbox=shares.inbox(post.slot),
            outboxes=shares.outboxes(set(range(workers_for(config))) - {post.slot}),
            admin=str(self._directory / f"{post.id}.sock"),
        )

    def _sockets_of(self, slot: int) -> list[socket]:
        if slot not in self._sockets:
            self._sockets[slot] = bind(self._addresses)
        return self._sockets[slot]

    def _close_sockets(self, slots: int = 0) -> None:
        """Close the sockets of the slots from this one on."""
        for slot in [slot for slot in self._sockets if slot >= slots]:
            for each in self._sockets.pop(slot):
                each.close()

    async def _listen_admin(self, stack: AsyncExitStack) -> str:
        runner, listen = runner_of(self._front.app()), self._first.admin
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        try:
            await web.TCPSite(runner, listen.host, listen.port, backlog=BACKLOG).start()
        except OSError as error:
            raise cannot_listen(error, listen.host, listen.port, "admin") from None
        return url_of(listen.host, runner.addresses[0][1])

    def _own_metrics(self) -> CollectorRegistry:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Own(self._figures))
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        return registry

    def _figures(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("kvroute_workers", "Worker processes that take requests", len(self._staff.serving()))
        yield CounterMetricFamily("kvroute_worker_restarts", "Workers that ended unasked", self._staff.restarts)
        if self._server is not None:
            yield CounterMetricFamily("kvroute_server_restarts", "Shared store: server restarts", self._server.restarts)


class _Own(Collector):
    def __init__(self, figures: Callable[[], Iterable[Metric]]) -> None:
        self._figures = figures

    def collect(self) -> Iterable[Metric]:
        return self._figures()


def claim_public(config: Config) -> list[Address]:
    """Return the addresses of the public listener.

    Raises:
        ConfigError: they cannot be had.
    """
    listen = config.listen
    try:
        return claim(listen.host, listen.port)
    except OSError as error:
        raise cannot_listen(error, listen.host, listen.port, "listen") from None


def check_reload(old: Config, new: Config) -> None:
    """Refuse settings that need a restart.

    Raises:
        ConfigError: names the first of them.
    """
    for name in ("listen", "admin", "store"):
        if getattr(old, name) != getattr(new, name):
            raise ConfigError(f"`{name}` cannot change without a restart")
    if not new.replicas:
        raise ConfigError("`replicas`: no replica given")


def policy_only(old: Config, new: Config) -> dict[str, Any] | None:
    """Return what to order where nothing but the policy differs: no process needs to be replaced for that."""
    order = {name: getattr(new.routing, name) for name in ("policy", "ttft_weight", "shadow")}
    alike = msgspec.structs.replace(old, routing=msgspec.structs.replace(old.routing, **order))
    return order if alike == new != old else None


async def _wait(event: asyncio.Event, timeout_s: float | None) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            await event.wait()
    except TimeoutError:
        pass
