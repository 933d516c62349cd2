"""A worker process by itself, spoken to as a supervisor would: its line, its input, its signals, its words."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvroute.workers.words import line
from tests.processes import KVROUTE, SimulatedReplica
from tests.workers.lent import lent

pytestmark = pytest.mark.slow  # real processes, many of them

ENDS_S = 20.0


@contextmanager
def worker(replica: SimulatedReplica, directory: Path, **overrides: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start one that is given a socket and a store in memory."""
    with lent(replica, directory, **overrides) as told:
        fds = [*told.sockets, told.counts, told.inbox, *told.outboxes.values()]
        process = subprocess.Popen(
            [*KVROUTE, "worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=fds
        )
        try:
            process.stdin.write(line(told))
            process.stdin.flush()
            yield process
        finally:
            process.kill()
            process.communicate()


def test_serves_and_says_its_last_words(replica, tmp_path):
    """It says that it serves, and at SIGTERM what it has counted; then it is gone with status 0."""
    with worker(replica, tmp_path) as process:
        assert json.loads(process.stdout.readline()) == {"serves": True}
        process.send_signal(signal.SIGTERM)
        assert json.loads(process.stdout.readline()) == {"stops": True}
        assert "kvroute_requests_active 0.0" in json.loads(process.stdout.readline())["metrics"]
        assert process.wait(ENDS_S) == 0
        assert list(tmp_path.iterdir()) == []


def test_ends_when_its_input_does(replica, tmp_path):
    """Without a supervisor it goes, and takes the directory of the admin sockets along."""
    directory = tmp_path / "sockets"
    directory.mkdir()
    with worker(replica, directory) as process:
        process.stdout.readline()
        assert (directory / "1.sock").exists()
        process.stdin.close()
        process.stdin = None
        assert process.wait(ENDS_S) == 0
        assert not directory.exists()


def test_says_why_it_does_not_start(replica, tmp_path):
    """A setting that cannot work is told as a value, not as a trace."""
    with worker(replica, tmp_path, tokenizer="/nowhere") as process:
        assert "/nowhere" in json.loads(process.stdout.readline())["error"]
        assert process.wait(ENDS_S) == 1


def test_is_no_command_for_people():
    """Without a line on its input it ends, and help does not show it."""
    done = subprocess.run([*KVROUTE, "worker"], stdin=subprocess.DEVNULL, check=False, timeout=ENDS_S)
    assert done.returncode == 1
    shown = subprocess.run([*KVROUTE, "--help"], capture_output=True, text=True, check=True, timeout=ENDS_S)
    assert "\n  worker" not in shown.stdout


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_signals_of_a_terminal_are_the_supervisors(replica, tmp_path, signum):
    """A Ctrl-C or a hang-up does not end a worker."""
    with worker(replica, tmp_path) as process:
        process.stdout.readline()
        process.send_signal(signum)
        with socket.socket(socket.AF_UNIX) as admin:
            admin.settimeout(ENDS_S)
            admin.connect(str(tmp_path / "1.sock"))
            admin.sendall(b"GET /health HTTP/1.1\r\nHost: a\r\n\r\n")
            assert admin.recv(100).startswith(b"HTTP/1.1 200")
        assert process.poll() is None
