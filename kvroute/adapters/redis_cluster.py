"""The way to a Redis Cluster: redis-py knows its nodes and follows their changes; we add the circuit.

Each call is a task of its own. Calls on one prefix may overtake each other here; whoever needs an order awaits.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from typing import Any

from redis.asyncio.cluster import ClusterNode, RedisCluster
from redis.exceptions import NoScriptError, RedisError, ResponseError

from kvroute.adapters.redis_link import CALLS_IN_FLIGHT_MAX, CONNECT_TIMEOUT_S, LinkStats, check_server
from kvroute.adapters.redis_scripts import script
from kvroute.adapters.redis_url import Target
from kvroute.adapters.redis_wire import Argument, Done, Reply
from kvroute.errors import ConfigError

log = logging.getLogger(__name__)

PROBE_EVERY_S = 0.2  # while down
CALL_TIMEOUT_S = 1.0


class ClusterLink:
    """Scripts on whatever node owns their prefix."""

    def __init__(self, target: Target) -> None:
        self.stats = LinkStats()
        self.on_up: list[Callable[[], None]] = []
        self._target = target
        self._client: RedisCluster | None = None
        self._calls: set[asyncio.Task[None]] = set()
        self._keeper: asyncio.Task[None] | None = None
        self._down = asyncio.Event()
        self._up = False

    @property
    def is_up(self) -> bool:
        return self._up

    @property
    def describe(self) -> str:
        return self._target.describe

    async def start(self) -> None:
        try:
            await self._connect()
        except (RedisError, OSError, TimeoutError) as error:
            self._down.set()
            log.warning("%s is not reachable (%s): routing on what this router placed itself", self.describe, error)
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="kvroute-redis-cluster")

    async def close(self) -> None:
        self._up = False
        tasks = [*self._calls, *([self._keeper] if self._keeper else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._drop()

    def run(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> bool:
        if not self._up or len(self._calls) >= CALLS_IN_FLIGHT_MAX:
            self.stats.refused += 1
            return False
        self.stats.calls += 1
        task = asyncio.get_running_loop().create_task(self._call(name, prefix, arguments, done))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return True

    def suspect(self) -> None:
        if self._up:
            self._up = False
            self.stats.suspected += 1
            self._down.set()

    async def _call(self, name: str, prefix: bytes, arguments: Sequence[Argument], done: Done) -> None:
        reply: Reply
        try:
            reply = await self._run(name, prefix, arguments)
        except ResponseError as error:
            reply = error
        except (RedisError, OSError, TimeoutError) as error:
            reply = ConnectionError(f"{self.describe}: {error}")
            self.suspect()
        except asyncio.CancelledError:
            done(ConnectionError("closed"))
            raise
        done(reply)

    async def _run(self, name: str, prefix: bytes, arguments: Sequence[Argument]) -> Reply:
        assert self._client is not None
        wanted = script(name)
        async with asyncio.timeout(CALL_TIMEOUT_S):
            try:
                return await self._client.execute_command("EVALSHA", wanted.sha, 1, prefix, *arguments)
            except NoScriptError:  # a node that is new here
                return await self._client.execute_command("EVAL", wanted.text, 1, prefix, *arguments)

    async def _keep(self) -> None:
        """While down, probe until the cluster answers again."""
        while True:
            await self._down.wait()
            try:
                await self._connect()
            except (RedisError, OSError, TimeoutError, ConfigError) as error:
                log.debug("%s is still not reachable: %s", self.describe, error)
                await asyncio.sleep(PROBE_EVERY_S)

    async def _connect(self) -> None:
        await self._drop()
        self._client = client = _client(self._target)
        async with asyncio.timeout(2 * CONNECT_TIMEOUT_S):
            await client.initialize()
            for node in client.get_primaries():
                info: bytes = await client.execute_command("INFO", target_nodes=node, NEVER_DECODE=True)
                check_server(_text(info), f"{self.describe} node {node.name}")
        self._down.clear()
        self._up = True
        self.stats.connects += 1
        log.info("connected to %s", self.describe)
        for tell in self.on_up:
            tell()

    async def _drop(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(RedisError, OSError):
                await client.aclose()


def _text(info: bytes | dict[str, Any]) -> bytes:
    """redis-py parses INFO into a mapping unless told otherwise."""
    if isinstance(info, bytes):
        return info
    return "\n".join(f"{name}:{value}" for name, value in info.items()).encode()


def _client(target: Target) -> RedisCluster:
    nodes = [ClusterNode(address[0], address[1]) for address in target.nodes if not isinstance(address, str)]
    tls: dict[str, Any] = {}
    if target.tls is not None:
        options = dict(target.tls_options)
        check = options.pop("ssl_check_hostname", "true").lower() not in ("false", "no", "0")
        tls = {"ssl": True, "ssl_check_hostname": check, **options}
    return RedisCluster(
        startup_nodes=nodes,
        username=target.username,
        password=target.password,
        socket_timeout=CALL_TIMEOUT_S,
        socket_connect_timeout=CONNECT_TIMEOUT_S,
        cluster_error_retry_attempts=1,
        **tls,
    )
