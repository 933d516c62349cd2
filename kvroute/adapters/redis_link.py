"""The way to Redis: connects, comes back by itself, runs scripts, and says at once when nobody is there.

`Link` is the contract: every call is one script on one key prefix, so that it means the same on one server and on a
cluster. `ServerLink` keeps one lean connection to one server, whether its address is fixed or found through Sentinel;
`redis_cluster.ClusterLink` has one to each master.

Circuit. The link is `up` while its connection answers. A caller whose deadline passed reports it (`suspect`): the link
is down from then until the PING that it sends behind the overdue calls is answered, or until it has connected again.
While it is down `run` refuses at once, so nobody waits for the dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

import hiredis
from msgspec import Struct

from kvroute.adapters.redis_scripts import NAMES, script
from kvroute.adapters.redis_url import Address, Target
from kvroute.adapters.redis_wire import Argument, Done, Reply, Wire, encode
from kvroute.errors import ConfigError, IndexUnavailable

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 1.0
PATIENCE_S = 3.0  # of background work
SILENCE_S = 1.0  # without an answer to the PING, a suspected connection is given up
RETRY_FIRST_S, RETRY_MOST_S = 0.02, 0.5  # the index is to be used again within 2 s of Redis' return


class LinkStats(Struct):
    """Plain counters; telemetry reads them."""

    calls: int = 0
    refused: int = 0  # while down, or with too much in flight
    suspected: int = 0
    connects: int = 0
    losses: int = 0


class Link(Protocol):
    """Runs scripts by name. Replies reach `done` as they are; a lost connection and an error reply as Exceptions."""

    stats: LinkStats
    on_up: list[Callable[[], None]]  # called whenever a connection is there, the first one included

    @property
    def is_up(self) -> bool: ...

    @property
    def describe(self) -> str: ...

    async def start(self) -> None:
        """Connect, or keep trying in the background.

        Raises:
            ConfigError: the server is there, but must not or cannot be used as it is set up.
        """

    async def close(self) -> None: ...

    def run(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> bool:
        """Run a script; False, and `done` is never called, where the link is down or has too much in flight."""

    def suspect(self) -> None:
        """Report that a call is overdue."""


async def ask(
    link: Link, name: str, prefix: bytes, arguments: Sequence[Argument], timeout_s: float = PATIENCE_S
) -> Reply:
    """Run a script and wait for its reply: for background work, which has time.

    Raises:
        IndexUnavailable: no link, no answer in time, or an error reply.
    """
    future: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
    if not link.run(name, prefix, arguments, lambda reply: None if future.done() else future.set_result(reply)):
        raise IndexUnavailable(f"{link.describe} is not reachable")
    try:
        async with asyncio.timeout(timeout_s):  # wait_for of Python 3.11 can swallow a cancellation as the reply comes
            reply = await future
    except TimeoutError:
        link.suspect()
        raise IndexUnavailable(f"{link.describe} did not answer {name} within {timeout_s} s") from None
    if isinstance(reply, Exception):
        raise IndexUnavailable(f"{link.describe} answered {name} with: {reply}")
    return reply


class ServerLink:
    """One lean connection to one server."""

    def __init__(self, target: Target, find: Callable[[], Awaitable[Address]], rng: random.Random) -> None:
        self.stats = LinkStats()
        self.on_up: list[Callable[[], None]] = []
        self._target = target
        self._find = find  # where the server is now: fixed, or asked of Sentinel
        self._rng = rng
        self._wire: Wire | None = None
        self._suspected = False
        self._lost = asyncio.Event()
        self._keeper: asyncio.Task[None] | None = None
        self._silence: asyncio.TimerHandle | None = None

    @property
    def is_up(self) -> bool:
        return self._wire is not None and not self._suspected

    @property
    def describe(self) -> str:
        return self._target.describe

    async def start(self) -> None:
        try:
            await self._connect()
        except (OSError, ConnectionError, TimeoutError) as error:
            log.warning("%s is not reachable (%s): routing on what this router placed itself", self.describe, error)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="kvroute-redis-link")

    async def close(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._keeper
        wire, self._wire = self._wire, None
        if wire is not None:
            wire.abort()
            await self._lost.wait()
        self._calm()

    def run(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> bool:
        wire = self._wire
        if wire is None or self._suspected or wire.is_full:
            self.stats.refused += 1
            return False
        self.stats.calls += 1
        wire.call(encode("EVALSHA", script(name).sha, 1, prefix, *arguments), done)
        return True

    def suspect(self) -> None:
        if self._wire is None or self._suspected:
            return
        self._suspected = True
        self.stats.suspected += 1
        loop = asyncio.get_running_loop()
        self._silence = loop.call_later(SILENCE_S, self._listen, self._wire, self._wire.replies)
        self._wire.call(encode("PING"), self._answered)

    def _listen(self, wire: Wire, replies: int) -> None:
        """Give a suspected connection up, unless it is only slow: as long as replies come, the PING's will."""
        if wire.replies == replies:
            wire.abort()
        else:
            self._silence = asyncio.get_running_loop().call_later(SILENCE_S, self._listen, wire, wire.replies)

    def _answered(self, reply: Reply) -> None:
        if not isinstance(reply, Exception):
            self._calm()

    def _calm(self) -> None:
        self._suspected = False
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _on_lost(self) -> None:
        self._lost.set()
        if self._wire is not None:
            self._wire = None
            self.stats.losses += 1
            log.warning("connection to %s lost: routing on what this router placed itself", self.describe)

    async def _keep(self) -> None:
        """Connect again whenever the connection is gone."""
        while True:
            if self._wire is not None:
                await self._lost.wait()
            wait_s = RETRY_FIRST_S
            while self._wire is None:
                await asyncio.sleep(wait_s * (0.5 + self._rng.random() / 2))  # routers must not return in step
                wait_s = min(2 * wait_s, RETRY_MOST_S)
                try:
                    await self._connect()
                except (OSError, ConnectionError, TimeoutError, ConfigError) as error:
                    log.debug("%s is still not reachable: %s", self.describe, error)

    async def _connect(self) -> None:
        """Open a connection and make it usable, or leave nothing behind."""
        address = await self._find()
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            self._lost.clear()
            wire = await open_wire(self._target, address, self._on_lost)
            try:
                await _prepare(wire, self._target)
            except BaseException:
                wire.abort()
                await self._lost.wait()
                raise
        self._wire = wire
        self._calm()
        self.stats.connects += 1
        log.info("connected to %s", self.describe)
        for tell in self.on_up:
            tell()


async def open_wire(target: Target, address: Address, lost: Callable[[], None]) -> Wire:
    """Open a bare connection; `lost` is called when it ends."""
    loop = asyncio.get_running_loop()
    if isinstance(address, str):
        return (await loop.create_unix_connection(lambda: Wire(lost), address))[1]
    host, port = address
    return (await loop.create_connection(lambda: Wire(lost), host, port, ssl=target.tls))[1]


async def login(wire: Wire, target: Target) -> None:
    """Present the credentials, if there are any.

    Raises:
        ConfigError: the server does not accept them.
    """
    if target.password is not None:
        credentials = [target.username, target.password] if target.username else [target.password]
        _check_login(await wire.command("AUTH", *credentials), target)


async def _prepare(wire: Wire, target: Target) -> None:
    """Log in, look whether this server may be used, and load the scripts."""
    await login(wire, target)
    if target.db:
        _expect(await wire.command("SELECT", target.db), f"selecting database {target.db}", target)
    check_server(_expect(await wire.command("INFO"), "INFO", target), target.describe)
    for name in NAMES:
        _expect(await wire.command("SCRIPT", "LOAD", script(name).text), f"loading {name}.lua", target)


def _expect(reply: Reply, doing: str, target: Target) -> bytes:
    _check_login(reply, target)
    if isinstance(reply, hiredis.ReplyError):
        if str(reply).startswith(("LOADING", "MASTERDOWN")):
            raise ConnectionError(str(reply))
        raise ConfigError(f"store.url: {target.describe} refused {doing}: {reply}")
    return bytes(reply)


def _check_login(reply: Reply, target: Target) -> None:
    if isinstance(reply, hiredis.ReplyError) and str(reply).startswith(("WRONGPASS", "NOAUTH", "ERR AUTH", "NOPERM")):
        raise ConfigError(f"store.url: {target.describe} does not accept the user name and password given: {reply}")


def check_server(info: bytes, described: str) -> None:
    """Look at a server's INFO: is it the one to write to, and will it keep what is written?

    Raises:
        ConnectionError: it is a replica, or still loading; another attempt may find the right one.
        ConfigError: it evicts keys when it is full, which would tear holes into the index unseen.
    """
    fields = dict(line.split(":", 1) for line in info.decode("utf-8", "replace").splitlines() if ":" in line)
    if fields.get("role", "master") != "master":
        raise ConnectionError(f"{described} is a replica")
    if fields.get("loading", "0") != "0":
        raise ConnectionError(f"{described} is loading its data")
    policy = fields.get("maxmemory_policy", "noeviction")
    if policy != "noeviction":
        raise ConfigError(
            f"store.url: {described} has maxmemory-policy {policy}, which would drop parts of the index unseen; "
            "set maxmemory-policy to noeviction, or give kvroute a server of its own"
        )
