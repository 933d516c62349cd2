"""A master found through a real Sentinel."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

from kvroute.adapters.redis_link import ask
from kvroute.adapters.store import open_link
from tests.processes import free_port, valkey_server
from tests.redis_servers import READY_S, server, until


@contextmanager
def sentinel(directory: Path, master_port: int) -> Iterator[int]:
    port = free_port()
    config = directory / "sentinel.conf"
    config.write_text(
        f"port {port}\nbind 127.0.0.1\ndir {directory}\nsentinel monitor main 127.0.0.1 {master_port} 1\n"
    )
    process = subprocess.Popen([valkey_server(), str(config), "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + READY_S
        while True:
            try:
                with redis.Redis(port=port) as client:
                    client.ping()
                break
            except redis.RedisError:
                assert time.monotonic() < deadline
                time.sleep(0.02)
        yield port
    finally:
        process.kill()
        process.wait()


async def test_the_master_is_found(tmp_path):
    """The link goes to the server that Sentinel names, also when the first Sentinel of the list is away."""
    with server(port=free_port()) as master, sentinel(tmp_path, master.port) as port:
        link = open_link(f"redis+sentinel://127.0.0.1:{free_port()},127.0.0.1:{port}/main")
        await link.start()
        await until(lambda: link.is_up)
        assert await ask(link, "promises", b"{x}", ("a",)) == []
        await link.close()


async def test_an_unknown_service_is_not_reachable(tmp_path):
    """A service that Sentinel does not know is a server that cannot be reached, not a crash."""
    with server(port=free_port()) as master, sentinel(tmp_path, master.port) as port:
        link = open_link(f"redis+sentinel://127.0.0.1:{port}/other")
        await link.start()
        assert not link.is_up
        await link.close()
