"""The private server: private, supervised, and never left behind."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import redis

from kvroute.adapters.embedded import SOCKET_PATH_MAX, EmbeddedServer, find_server, socket_directory
from kvroute.errors import ConfigError
from tests.redis_servers import until

PARENT = """
import asyncio
from kvroute.adapters.embedded import EmbeddedServer

async def main():
    server = EmbeddedServer()
    await server.start()
    print(server.url, server.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def client(url: str) -> redis.Redis:
    return redis.Redis(unix_socket_path=url.removeprefix("unix://"))


def is_gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


async def test_it_is_private_and_keeps_nothing_on_disk():
    """The server listens on a Unix socket in a directory of its own, on no port; it evicts and saves nothing."""
    server = EmbeddedServer()
    await server.start()
    directory = Path(server.url.removeprefix("unix://")).parent
    try:
        assert stat.S_IMODE(directory.stat().st_mode) == 0o700
        with client(server.url) as one:
            for name, value in (("port", "0"), ("save", ""), ("appendonly", "no"), ("maxmemory-policy", "noeviction")):
                assert one.config_get(name)[name] == value
    finally:
        pid = server.pid
        await server.close()
    assert is_gone(pid)
    assert not directory.exists()


async def test_it_is_started_again_when_it_dies():
    """A killed server comes back under the same address."""
    server = EmbeddedServer()
    await server.start()
    try:
        first = server.pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: server.restarts == 1)
        assert server.pid != first
        with client(server.url) as one:
            assert one.ping()
    finally:
        await server.close()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
async def test_it_does_not_outlive_its_parent(how):
    """However the process that started it dies, the server and its directory are gone soon after."""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", PARENT, stdout=subprocess.PIPE)
    assert parent.stdout is not None
    url, pid = (await parent.stdout.readline()).decode().split()
    with client(url) as one:
        assert one.ping()
    parent.send_signal(how)
    await parent.wait()
    await until(lambda: is_gone(int(pid)))
    await until(lambda: not Path(url.removeprefix("unix://")).parent.exists())


async def test_a_binary_that_does_not_start_is_said_so():
    """A server that ends at once is an error that says which and why, and leaves nothing."""
    server = EmbeddedServer("/bin/false")
    with pytest.raises(ConfigError, match="/bin/false does not start"):
        await server.start()


def test_there_is_a_server_to_start():
    """A server is found: on the PATH, or in the wheel that we depend on."""
    assert os.access(find_server(), os.X_OK)


def test_paths_of_sockets_stay_short(tmp_path, monkeypatch):
    """Below a temporary directory with a long name, sockets get another one that kernels accept."""
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    made = socket_directory("redis.sock")
    try:
        assert len(str(made / "redis.sock")) <= SOCKET_PATH_MAX
        assert made.stat().st_mode & 0o077 == 0
    finally:
        made.rmdir()
