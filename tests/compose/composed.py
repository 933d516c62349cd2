"""Runs the services of docker-compose.yml as processes of this machine, without Docker.

Commands, environment and health checks are the file's own. Only addresses change: every port of every service becomes a
free port on loopback, wherever its own commands or those of others name it.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

from tests.admin import until
from tests.processes import KVROUTE, Program, free_port, valkey_server

FILE = Path(__file__).parents[2] / "docker-compose.yml"
HERE = "127.0.0.1"
PROGRAMS = {"kvroute": list(KVROUTE), "python": [sys.executable], "valkey-server": [valkey_server()]}


class Composed:
    """The file's services as processes; a context manager."""

    def __init__(self, logs: Path) -> None:
        self.services: dict[str, dict[str, Any]] = yaml.safe_load(FILE.read_text())["services"]
        self.logs = logs
        self.ports: dict[tuple[str, str], int] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Composed:
        with ExitStack() as stack:
            for name in self._in_order():
                service = self.services[name]
                env = {
                    key: self._readdressed(name, str(value)) for key, value in service.get("environment", {}).items()
                }
                program = Program(self.command(name, service["command"]), self.logs / f"{name}.log", env)
                stack.enter_context(program)
                self._wait_until_healthy(name, program)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def url(self, name: str, port: str) -> str:
        """Return where a port of a service listens on this machine."""
        return f"http://{HERE}:{self._port(name, port)}"

    def command(self, name: str, words: list[str]) -> list[str]:
        """Return a command of the file as it runs here."""
        program, *rest = words
        here = [self._readdressed(name, word) for word in rest]
        for at, word in enumerate(rest):
            if word in {"--port", "--admin-port"}:
                here[at + 1] = str(self._port(name, rest[at + 1]))
        return PROGRAMS[program] + here

    def _readdressed(self, name: str, text: str) -> str:
        def address(found: re.Match[str]) -> str:
            host, port = found.groups()
            return f"{HERE}:{self._port(host if host in self.services else name, port)}"

        hosts = "|".join(map(re.escape, [*self.services, HERE]))
        return re.sub(rf"\b({hosts}):(\d+)\b", address, text).replace("0.0.0.0", HERE)

    def _port(self, name: str, port: str) -> int:
        if (name, port) not in self.ports:
            self.ports[name, port] = free_port()
        return self.ports[name, port]

    def _in_order(self) -> list[str]:
        return sorted(self.services, key=lambda name: len(self.services[name].get("depends_on", {})))

    def _wait_until_healthy(self, name: str, program: Program) -> None:
        kind, *check = self.services[name]["healthcheck"]["test"]
        assert kind == "CMD"
        if check[0] not in PROGRAMS:  # a client that this machine may not have
            program.said("[Rr]eady to accept connections")
            return
        command = self.command(name, check)
        healthy = until(lambda: subprocess.run(command, capture_output=True).returncode == 0, bool, timeout_s=30)
        assert healthy, f"{name} is not healthy:\n{program.text[-3000:]}"
