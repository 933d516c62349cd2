"""The composition root: every concrete part is named here once, started in order, and closed in the opposite order.

Nothing else reads the whole configuration; each part gets the few values that it needs.
"""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from random import SystemRandom

import msgspec
from aiohttp import web
from msgspec import Struct
from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector

from kvroute.adapters.model_files import find_model
from kvroute.adapters.sized import Sized, sized
from kvroute.adapters.store import Store, open_store
from kvroute.adapters.tls import server_tls
from kvroute.adapters.upstream import Upstream, UpstreamSettings
from kvroute.config import Config
from kvroute.errors import ConfigError
from kvroute.proxy.address import cannot_listen, url_of
from kvroute.proxy.admin import Admin
from kvroute.proxy.admin_site import runner_of
from kvroute.proxy.catalogue import Catalogue
from kvroute.proxy.dispatch import Dispatch, DispatchSettings
from kvroute.proxy.explain import Explain
from kvroute.proxy.feeds import Feeds, FeedSettings
from kvroute.proxy.followers import EventSettings
from kvroute.proxy.handler import Handler, HandlerSettings
from kvroute.proxy.holds import Holds
from kvroute.proxy.learn import Learner
from kvroute.proxy.listener import BACKLOG, Listener
from kvroute.proxy.peers import Peers
from kvroute.proxy.placing import Placing
from kvroute.proxy.policy import Order, Policies
from kvroute.proxy.question import Asker
from kvroute.proxy.sharing import Sharing
from kvroute.proxy.stats import HandlerStats
from kvroute.proxy.telemetry import Telemetry
from kvroute.proxy.tenants import Tenants
from kvroute.routing.account import Account
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.cost import Slo
from kvroute.routing.fleet import Fleet
from kvroute.routing.replica import ModelCard, Replica
from kvroute.routing.router import Router
from kvroute.routing.seen import SeenWindow
from kvroute.sizing.hardware import gpu

log = logging.getLogger("kvroute")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)
FIRST_ROUND_S = 2.0  # how long the start waits for replicas to say who they are


class Doors(Struct):
    """Where a router listens that is one of several processes on a port."""

    public: list[socket.socket]  # bound
    admin: str  # path of a Unix socket, made by the router
    peers: Peers | None = None  # the other processes


class Service:
    """One router: a public and an admin listener, and everything behind them.

    Args:
        config: all settings.
        doors: where to listen instead of the addresses that the settings name.
    """

    def __init__(self, config: Config, doors: Doors | None = None) -> None:
        self.config = config
        self.registry = CollectorRegistry(auto_describe=False)
        self.fleet = Fleet()
        self.stats = HandlerStats()
        self.url = ""  # of the public listener, known once it listens
        self.admin_url = ""
        self.is_stopping = False
        self._is_hurried = False
        self.feeds: Feeds | None = None  # once started
        self.policies: Policies | None = None  # likewise
        self._stack = AsyncExitStack()
        self._public: Listener | None = None
        self._upstream: Upstream | None = None
        self._doors = doors

    async def start(self) -> None:
        """Start every part and listen.

        Raises:
            ConfigError: a setting cannot work, such as a port in use or a Redis that may evict.
        """
        try:
            await self._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """Take no new connections, let requests end for a while, then close everything."""
        self.is_stopping = True
        if self._public is not None:
            self._public.stop_accepting()
        try:
            async with asyncio.timeout(self.config.drain_timeout_s):
                while self.stats.active and not self._is_hurried:  # noqa: ASYNC110 - counted by many tasks; the end of a process may poll
                    await asyncio.sleep(0.05)
        except TimeoutError:
            log.warning("%s requests did not end in %s s", self.stats.active, self.config.drain_timeout_s)
        if self._is_hurried and self.stats.active:
            log.warning("%s requests are broken off", self.stats.active)
        await self._stack.aclose()

    def hurry(self) -> None:
        """Have `stop` wait for no request any longer."""
        self._is_hurried = True

    async def _start(self) -> None:
        config, catalogue, account = self.config, Catalogue(), Account()
        if config.tokenizer not in ("auto", "none"):
            find_model(config.tokenizer, None, "", {})  # a directory without a tokenizer stops the start
        store = await self._open_store()
        feeds = self.feeds = self._make_feeds(store, catalogue)
        router = self._router()
        sharing = Sharing(fleet=self.fleet, router=router, ledger=store.ledger, account=account, accounts=store.account)
        upstream = self._upstream = Upstream(self._upstream_settings(), self._key_of())
        learner = Learner(store.index, self.stats)
        asker = Asker(store.index, SeenWindow(), self.stats, feeds.honesty)
        placing = Placing(
            router=router,
            ledger=store.ledger,
            stats=self.stats,
            fleet_changed=feeds.changed,
            no_replica_wait_s=config.proxy.no_replica_wait_s,
            again=asker.again,
        )
        dispatch = Dispatch(
            placing=placing,
            upstream=upstream,
            index=store.index,
            account=account,
            learner=learner,
            stats=self.stats,
            settings=self._dispatch_settings(),
            judge=feeds.judge,
            report=feeds.report,
        )
        handler = Handler(
            asker=asker,
            dispatch=dispatch,
            placing=placing,
            catalogue=catalogue,
            cards=self._cards,
            tenants=self._tenants(),
            stats=self.stats,
            settings=HandlerSettings(
                body_bytes_max=config.proxy.body_bytes_max, log_requests=config.proxy.log_requests
            ),
        )
        self._stack.callback(handler.close)
        await sharing.start()
        self._stack.push_async_callback(sharing.close)
        await upstream.start()
        self._stack.push_async_callback(upstream.close)
        await learner.start()
        self._stack.push_async_callback(learner.close)
        replicas = [(replica.url.rstrip("/"), replica.api_key) for replica in config.replicas]
        await feeds.start(replicas, config.proxy.replica_trust)
        self._stack.push_async_callback(feeds.close)
        await feeds.first_round(FIRST_ROUND_S)
        self.policies = Policies(router=router, placing=placing)
        explain = Explain(router=router, index=store.index, honesty=feeds.honesty, catalogue=catalogue)
        holds = Holds(router=router, stats=self.stats.holds)
        more = [*explain.routes(), *holds.routes(), *self.policies.routes()]
        await self._listen_admin(store, feeds, sharing, router, more)
        await self._listen(handler)

    def _connections(self) -> dict[str, int]:
        """Count open sockets by who is at their other end."""
        sides = {"clients": self._public, "replicas": self._upstream}
        return {name: 0 if side is None else side.open_connections for name, side in sides.items()}

    async def _open_store(self) -> Store:
        settings = self.config.store
        store = await open_store(
            settings.url,
            memory=settings.kind == "memory",
            deployment=settings.deployment,
            lookup_deadline_s=settings.lookup_deadline_ms / 1000,
            shards=settings.shards,
        )
        self._stack.push_async_callback(store.close)
        log.info("store: %s", store.describe())
        return store

    def _make_feeds(self, store: Store, catalogue: Catalogue) -> Feeds:
        config = self.config
        return Feeds(
            fleet=self.fleet,
            index=store.index,
            catalogue=catalogue,
            tokenizer=config.tokenizer,
            checks_tokenizer=config.tokenizer_check,
            settings=msgspec.convert(config.feeds, FeedSettings, from_attributes=True),
            size=self._sizer(),
            events=self._event_settings(),
        )

    def _event_settings(self) -> EventSettings:
        events = self.config.events
        return EventSettings(
            is_wanted=events.mode not in ("off", False),
            is_required=events.mode in ("on", True),
            endpoint=events.endpoint,
            replay_endpoint=events.replay_endpoint,
            topic=events.topic,
            engines_dial=events.engines_dial,
            reports=events.reports,
        )

    def _sizer(self) -> Callable[[ModelCard], Sized | None]:
        hardware = self.config.hardware
        if hardware.gpu is None:
            return lambda card: None
        try:
            name, count = gpu(hardware.gpu).name, hardware.tensor_parallel
        except ConfigError as error:
            raise ConfigError(f"`hardware.gpu`: {error}") from None
        return lambda card: sized(card.root, card.name, name, count)

    def _router(self) -> Router:
        routing = self.config.routing
        holds = routing.holds
        return Router(
            self.fleet,
            routing.policy,
            SystemRandom(),
            ttft_weight=routing.ttft_weight,
            slo=None if routing.slo is None else Slo(routing.slo.ttft_s, routing.slo.token_s),
            shadows=routing.shadow,
            admission=AdmissionSettings(
                holds_max=holds.requests_max, hold_bytes_max=holds.bytes_max, hold_s=holds.wait_s
            )
            if holds.enabled
            else None,
        )

    def _tenants(self) -> Tenants:
        tenants = self.config.tenants
        return Tenants(
            tenants.keys,
            tenants.header,
            classes=tenants.classes,
            class_of=tenants.class_of,
            class_header=tenants.class_header,
        )

    def reload(self, config: Config) -> None:
        """Take on what other settings say about the policy; say in the log what needs a restart.

        Raises:
            ConfigError: the policy cannot be.
        """
        assert self.policies is not None, "reloaded before its start"
        routing = config.routing
        self.policies.follow(Order(routing.policy, routing.ttft_weight, routing.shadow))
        old = self.config
        self.config = msgspec.structs.replace(
            old,
            routing=msgspec.structs.replace(
                old.routing, policy=routing.policy, ttft_weight=routing.ttft_weight, shadow=routing.shadow
            ),
        )
        changed = [name for name in config.__struct_fields__ if getattr(config, name) != getattr(self.config, name)]
        if changed:
            log.warning("a single process keeps its other settings; a restart would change: %s", ", ".join(changed))

    def _upstream_settings(self) -> UpstreamSettings:
        proxy = self.config.proxy
        return UpstreamSettings(
            connect_timeout_s=proxy.connect_timeout_s,
            first_byte_timeout_s=proxy.first_byte_timeout_s,
            idle_timeout_s=proxy.idle_timeout_s,
            tls_verify=proxy.replica_trust,
        )

    def _dispatch_settings(self) -> DispatchSettings:
        proxy = self.config.proxy
        return DispatchSettings(
            attempts_max=proxy.attempts_max,
            waiting_comment_s=proxy.waiting_comment_s,
            ask_for_usage=proxy.ask_for_usage,
            expose_prediction=proxy.expose_prediction,
        )

    def _key_of(self) -> Callable[[Replica], str | None]:
        keys = {replica.url.rstrip("/"): replica.api_key for replica in self.config.replicas}

        def key_of(replica: Replica) -> str | None:
            return keys.get(replica.url)

        return key_of

    def _cards(self) -> Iterator[ModelCard]:
        """Every model and adapter of the pool, each once."""
        seen: set[str] = set()
        for replica in self.fleet.replicas():
            for card in replica.cards:
                if card.name not in seen:
                    seen.add(card.name)
                    yield card

    async def _listen(self, handler: Handler) -> None:
        listener, listen = Listener(handler.handle, on_refused=self._count_refused), self.config.listen
        self._stack.push_async_callback(listener.close)
        tls = self._listener_tls()
        try:
            if self._doors is not None:
                port = self._doors.public[0].getsockname()[1]
                listener.start_on(self._doors.public, self._doors.peers, tls)
            else:
                port = await listener.start(listen.host, listen.port, tls)
        except OSError as error:
            raise cannot_listen(error, listen.host, listen.port, "listen") from None
        self._public = listener
        self.url = url_of(listen.host, port, is_tls=tls is not None)

    def _listener_tls(self) -> ssl.SSLContext | None:
        proxy = self.config.proxy
        return server_tls(proxy.tls_certificate, proxy.tls_key) if proxy.tls_certificate else None

    def _count_refused(self, status: int) -> None:
        self.stats.count("refused", status)

    async def _listen_admin(
        self, store: Store, feeds: Feeds, sharing: Sharing, router: Router, more: list[web.RouteDef]
    ) -> None:
        registry = self.registry
        registry.register(
            Telemetry(
                fleet=self.fleet,
                handler=self.stats,
                feeds=feeds.stats,
                readers=feeds.readers,
                store=store.stats,
                connections=self._connections,
                knowledge=feeds.knowledge,
                standing=lambda: None if router.admission is None else router.admission.standing(),
                shadows=lambda: () if router.shadows is None else router.shadows.tallies,
            )
        )
        ProcessCollector(registry=registry)
        PlatformCollector(registry=registry)
        admin = Admin(
            fleet=self.fleet,
            accounts=store.account,
            sharing=sharing,
            registry=registry,
            describe_index=store.describe,
            knowledge=feeds.knowledge,
            reset=feeds.reset,
            is_draining=lambda: self.is_stopping,
            more=more,
            body_bytes_max=self.config.proxy.body_bytes_max,
        )
        runner = runner_of(admin.app())
        listen = self.config.admin
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        if self._doors is not None:
            await web.UnixSite(runner, self._doors.admin).start()
            return
        try:
            await web.TCPSite(runner, listen.host, listen.port, backlog=BACKLOG).start()
        except OSError as error:
            raise cannot_listen(error, listen.host, listen.port, "admin") from None
        self.admin_url = url_of(listen.host, runner.addresses[0][1])


async def run(config: Config, load: Callable[[], Config]) -> None:
    """Serve until SIGTERM or SIGINT; print one line with the addresses once requests are taken.

    Args:
        config: all settings.
        load: reads them again, at SIGHUP; what they say about the policy is followed from then on. Raises ConfigError.
    """
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    service = Service(config)

    def stop() -> None:
        if not stopped.is_set():
            stopped.set()
            return
        service.hurry()
        for signum in STOP_SIGNALS:
            loop.remove_signal_handler(signum)  # a third one ends the process at once

    for signum in STOP_SIGNALS:
        loop.add_signal_handler(signum, stop)

    def reload() -> None:
        try:
            service.reload(load())
        except ConfigError as error:
            log.error("the new settings are not used: %s", error)

    loop.add_signal_handler(signal.SIGHUP, log.warning, "SIGHUP came before the start was over; send it again")
    await service.start()
    loop.add_signal_handler(signal.SIGHUP, reload)
    try:
        print(f"kvroute serving on {service.url}, admin on {service.admin_url}", flush=True)
        await stopped.wait()
    finally:
        await service.stop()
