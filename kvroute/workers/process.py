"""One worker process, seen from the supervisor: started, asked to end, and listened to until its last word."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from typing import Any

import aiohttp
import msgspec

from kvroute.config import Config
from kvroute.workers.merge import Page
from kvroute.workers.staff import Post
from kvroute.workers.words import LINE_BYTES_MAX, Assignment, Said, line

ASK_S = 5.0  # for an answer on the admin socket


class WorkerProcess:
    """A process that was started for a post."""

    def __init__(self, post: Post, config: Config, process: asyncio.subprocess.Process, admin: str) -> None:
        self.post = post
        self.config = config
        self.page: Page = []  # its metrics when it was asked last
        self._process = process
        self._admin = admin

    @classmethod
    async def start(cls, post: Post, assignment: Assignment, *, verbose: bool) -> WorkerProcess:
        """Start a process and give it its line.

        Raises:
            OSError: it cannot be started.
        """
        lent = (*assignment.sockets, assignment.counts, assignment.inbox, *assignment.outboxes.values())
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "kvroute", "worker", *(("--verbose",) if verbose else ())),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            pass_fds=lent,
            limit=LINE_BYTES_MAX,
            start_new_session=True,  # a Ctrl-C is for the supervisor, which lets requests end
        )
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):  # it has ended already; that shows when it is listened to
            process.stdin.write(line(assignment))
            await process.stdin.drain()
        return cls(post, assignment.config, process, assignment.admin)

    @property
    def pid(self) -> int:
        """Return the process id."""
        return self._process.pid

    async def hear(self) -> Said | None:
        """Return the next line that it says, None where there will be no more."""
        assert self._process.stdout is not None
        try:
            text = await self._process.stdout.readline()
            return msgspec.json.decode(text, type=Said) if text else None
        except ValueError:  # longer than any line, or cut off by its death
            return None

    async def ended(self) -> int:
        """Wait until the process is gone; return its exit code, negative for a signal."""
        return await self._process.wait()

    def stop(self) -> None:
        """Ask it to end when its requests have."""
        with contextlib.suppress(ProcessLookupError):
            self._process.terminate()

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()

    async def ask(self, method: str, target: str, body: bytes = b"") -> tuple[int, str, bytes]:
        """Ask its admin listener; return status, content type and body.

        Raises:
            aiohttp.ClientError, TimeoutError, OSError: it does not answer.
        """
        settings: dict[str, Any] = {
            "connector": aiohttp.UnixConnector(self._admin),
            "timeout": aiohttp.ClientTimeout(total=ASK_S),
        }
        async with (
            aiohttp.ClientSession("http://worker", **settings) as session,
            session.request(method, target, data=body or None) as answer,
        ):
            return answer.status, answer.headers.get("Content-Type", "text/plain"), await answer.read()
