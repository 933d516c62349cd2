"""Where the server is: at a fixed address, or where Sentinel says that the master is now."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from redis.asyncio import Sentinel
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kvroute.adapters.redis_url import Address, Target

TIMEOUT_S = 0.5  # of each Sentinel


def finder(target: Target) -> Callable[[], Awaitable[Address]]:
    """Return what tells the server's address; it raises ConnectionError where nobody knows."""
    return _Sentinels(target).find if target.kind == "sentinel" else _Fixed(target).find


class _Fixed:
    def __init__(self, target: Target) -> None:
        self._address = target.nodes[0]

    async def find(self) -> Address:
        return self._address


class _Sentinels:
    def __init__(self, target: Target) -> None:
        self._target = target

    async def find(self) -> Address:
        login = {"username": self._target.sentinel_username, "password": self._target.sentinel_password}
        tls = {"ssl": True, **self._target.tls_options} if self._target.tls is not None else {}
        given = {name: value for name, value in login.items() if value}
        limits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": TIMEOUT_S, "retry": Retry(NoBackoff(), 0)}
        nodes = [node for node in self._target.nodes if not isinstance(node, str)]
        sentinels = Sentinel(nodes, sentinel_kwargs={**limits, **given, **tls})  # type: ignore[no-untyped-call]
        try:
            host, port = await sentinels.discover_master(self._target.service)
        except RedisError as error:
            raise ConnectionError(f"{self._target.describe}: {error}") from error
        finally:
            for client in sentinels.sentinels:
                await client.aclose()
        return str(host), int(port)
