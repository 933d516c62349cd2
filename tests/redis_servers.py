"""Real Valkey or Redis servers for tests, as child processes that a test may kill and start again."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import redis

from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.store import open_link
from tests.processes import free_port, valkey_server

READY_S = 10.0
_numbers = itertools.count()


class Server:
    """A server on a Unix socket, or on a loopback port where `arguments` ask for one."""

    def __init__(self, directory: Path, *arguments: str, port: int = 0) -> None:
        self.directory, self.port, self.arguments = directory, port, arguments
        self.socket = directory / "redis.sock"
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}" if self.port else f"unix://{self.socket}"

    def client(self) -> redis.Redis:
        return redis.Redis(port=self.port) if self.port else redis.Redis(unix_socket_path=str(self.socket))

    def start(self) -> Server:
        command = [valkey_server(), "--port", str(self.port), "--unixsocket", str(self.socket), "--save", ""]
        command += ["--dir", str(self.directory), "--logfile", str(self.directory / "log"), *self.arguments]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with self.client() as client:
                    client.ping()
                return self
            except (redis.RedisError, OSError):
                assert time.monotonic() < deadline, (self.directory / "log").read_text()
                time.sleep(0.01)

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait()


@contextmanager
def server(*arguments: str, port: int = 0) -> Iterator[Server]:
    """Run a server for as long as the context lasts."""
    with tempfile.TemporaryDirectory(prefix="kvr") as directory:
        one = Server(Path(directory), *arguments, port=port).start()
        try:
            yield one
        finally:
            one.kill()


@contextmanager
def cluster() -> Iterator[str]:
    """Run a cluster of a single node and return its URL."""
    port, bus = free_port(), free_port()
    with server("--cluster-enabled", "yes", "--cluster-port", str(bus), port=port) as node, node.client() as client:
        client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)
        deadline = time.monotonic() + READY_S
        while b"cluster_state:ok" not in client.execute_command("CLUSTER", "INFO", NEVER_DECODE=True):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        yield f"redis+cluster://127.0.0.1:{port}"


def fresh_name(prefix: str = "t") -> str:
    """Return a deployment's name that no other test of this run uses."""
    return f"{prefix}{next(_numbers)}"


async def until(true: Callable[[], bool] | Callable[[], Awaitable[bool]], timeout_s: float = 20.0) -> None:
    """Wait until something holds; a generous bound, so that it says nothing about speed."""
    deadline = time.monotonic() + timeout_s
    while True:
        result = true()
        if await result if isinstance(result, Awaitable) else result:
            return
        assert time.monotonic() < deadline, "it never came true"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def router(
    url: str,
    deployment: str,
    name: str,
    deadline_s: float = 5.0,
    shards: int = 1,
    is_alone: Callable[[], bool] = lambda: False,
) -> AsyncIterator[RedisIndex]:
    """Open a router's index. Its deadline is long: a machine under load must not turn answers into local ones."""
    link = open_link(url)
    await link.start()
    index = RedisIndex(
        link, deployment=deployment, router_id=name, deadline_s=deadline_s, shards=shards, is_alone=is_alone
    )
    await index.start()
    try:
        yield index
    finally:
        await index.close()
        await link.close()
