"""A worker process: one router behind the supervisor's sockets, from the supervisor's line to its own last words.

It ends when it is told to with SIGTERM, and when its input is closed: then the supervisor is gone, and with it the
store, the admin listener and whoever would replace it. In both cases requests under way may end first. A thread makes
sure that it does end, also where the loop hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from socket import socket

import msgspec
import uvloop
from prometheus_client import generate_latest

from kvroute.errors import ConfigError
from kvroute.proxy.app import Doors, Service
from kvroute.workers.shares import peers_of
from kvroute.workers.words import Assignment, Said, line

END_S = 5.0  # beyond the time for requests to end


def main() -> int:
    """Work until told otherwise; return an exit status."""
    output = os.dup(1)
    os.dup2(2, 1)  # what a library prints is not for the supervisor
    told = sys.stdin.buffer.readline()
    if not told:
        return 1
    return uvloop.run(_work(msgspec.json.decode(told, type=Assignment), output))


async def _work(assignment: Assignment, output: int) -> int:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    orphaned = threading.Event()
    loop.add_signal_handler(signal.SIGTERM, stopped.set)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the supervisor, which lets requests end
    signal.signal(signal.SIGHUP, signal.SIG_IGN)

    def tell_loop() -> None:
        with contextlib.suppress(RuntimeError):  # it is closed already
            loop.call_soon_threadsafe(stopped.set)

    limit_s = assignment.config.drain_timeout_s + END_S
    threading.Thread(target=_watch, args=(orphaned, tell_loop, limit_s), daemon=True).start()
    peers = peers_of(assignment.slot, assignment.counts, assignment.inbox, assignment.outboxes)
    doors = Doors([socket(fileno=fd) for fd in assignment.sockets], assignment.admin, peers)
    service = Service(assignment.config, doors)
    try:
        await service.start()
    except ConfigError as error:
        _say(output, Said(error=str(error)))
        return 1
    try:
        _say(output, Said(serves=True))
        await stopped.wait()
        _say(output, Said(stops=True))
    finally:
        await service.stop()
        _tidy(Path(assignment.admin), is_last=orphaned.is_set())
    _say(output, Said(metrics=generate_latest(service.registry).decode()))
    return 0


def _watch(orphaned: threading.Event, tell_loop: Callable[[], None], limit_s: float) -> None:
    """Wait in a thread until the supervisor is gone, and see to it that this process goes as well."""
    while os.read(0, 4096):
        pass
    orphaned.set()
    tell_loop()
    time.sleep(limit_s)
    os._exit(1)


def _say(output: int, said: Said) -> None:
    data = line(said)
    with contextlib.suppress(OSError):  # nobody listens any more
        while data:
            data = data[os.write(output, data) :]


def _tidy(admin: Path, *, is_last: bool) -> None:
    """Remove the admin socket; without a supervisor its directory, too, once no worker has anything in it."""
    admin.unlink(missing_ok=True)
    if is_last:
        with contextlib.suppress(OSError):
            admin.parent.rmdir()
