"""Asks an engine to say once more, in its events, what a request has just found in its cache.

After events were lost, or where a router came late, deliveries say what a cache holds, but not by which names the
engine will say that it is gone. vLLM tells these (`kv_cache_report_mode: full`), and from 0.30 on with the session of
the request, by which the listener knows what may be told twice. So the request is sent once more, for one token, to the
replica that has just answered it; never in a client's own request, whose answer the mode would change.

One such question to a replica at a time, a pause between two, and none twice of late: an answer may be lost, as events
are. It does not know who listens to the events.
"""

from __future__ import annotations

import asyncio
import logging
import re

import msgspec
from xxhash import xxh3_64_intdigest

from kvroute.adapters.replica_client import ReplicaClient
from kvroute.errors import ReplicaBroke, ReplicaFailed
from kvroute.kv.events import REPORT_SESSION
from kvroute.routing.replica import Replica, ReplicaId

log = logging.getLogger("kvroute.reports")

PATHS = frozenset({"/v1/chat/completions", "/v1/completions"})
BODY_BYTES_MAX = 1 << 20
PAUSE_S = 0.2  # of one replica, between two
RECENT_MAX = 1024
RECENT_S = 30.0  # before the same is asked again
SINCE = (0, 30)  # vLLM's first release whose events name the session
_KEPT = frozenset(  # what makes the prompt, and nothing that makes the answer
    {
        *("model", "messages", "prompt", "tools", "tool_choice", "documents", "chat_template", "chat_template_kwargs"),
        *("add_generation_prompt", "continue_final_message", "add_special_tokens", "reasoning_effort", "cache_salt"),
        *("mm_processor_kwargs", "media_io_kwargs", "truncate_prompt_tokens", "truncation_side"),
    }
)
_VERSION = re.compile(rb'"version"\s*:\s*"(\d+)\.(\d+)\.')


class Reporter:
    """The questions under way, and which replicas can answer them."""

    def __init__(self) -> None:
        self.asked = 0
        self._tasks: dict[ReplicaId, asyncio.Task[None]] = {}
        self._answers: dict[ReplicaId, bool] = {}  # whether its events name sessions
        self._recent: dict[tuple[ReplicaId, int], float] = {}  # requests sent once more, and when, oldest first

    def ask(self, client: ReplicaClient, replica: Replica, path: str, body: bytes) -> None:
        """Have a replica report what a request that it has just answered found, unless one is under way."""
        if path not in PATHS or len(body) > BODY_BYTES_MAX or not self._answers.get(replica.id, True):
            return
        if replica.id in self._tasks:
            return
        loop, request = asyncio.get_running_loop(), (replica.id, xxh3_64_intdigest(body))
        if loop.time() < self._recent.get(request, -RECENT_S) + RECENT_S:
            return
        self._recent.pop(request, None)
        self._recent[request] = loop.time()
        if len(self._recent) > RECENT_MAX:
            del self._recent[next(iter(self._recent))]
        task = loop.create_task(self._ask(client, replica, path, body), name="kvroute-report")
        self._tasks[replica.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(replica.id, None))

    def forget(self, replica: ReplicaId) -> None:
        """A replica has left, or restarted, perhaps as another release."""
        if task := self._tasks.get(replica):
            task.cancel()
        self._answers.pop(replica, None)
        self._recent = {request: asked_s for request, asked_s in self._recent.items() if request[0] != replica}

    async def close(self) -> None:
        """Give up what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: ReplicaClient, replica: Replica, path: str, body: bytes) -> None:
        try:
            await self._send(client, replica, path, body)
        except ReplicaFailed as error:
            log.debug("%s was not asked about its cache: %s", replica.id, error)
            self._recent.pop((replica.id, xxh3_64_intdigest(body)), None)  # it may be asked the same again
        await asyncio.sleep(PAUSE_S)

    async def _send(self, client: ReplicaClient, replica: Replica, path: str, body: bytes) -> None:
        """Ask a replica, if it is of a release that can answer.

        Raises:
            ReplicaFailed: it did not answer.
        """
        if replica.id not in self._answers:
            version = await client.answered("GET", "/version")
            if version.status >= 500:
                raise ReplicaBroke(f"/version answered {version.status}", replica=client.url)
            self._answers[replica.id] = names_sessions(version.body)
        if not self._answers[replica.id] or (probe := probe_of(body)) is None:
            return
        headers = {} if replica.rank is None else {"X-data-parallel-rank": str(replica.rank)}
        self.asked += 1
        answer = await client.answered("POST", path, body=probe, headers=headers)
        if answer.status != 200:
            log.debug("%s answered %s to a question about its cache", replica.id, answer.status)


def names_sessions(body: bytes) -> bool:
    """Say whether the release that answers /version so names sessions in its events."""
    found = _VERSION.search(body)
    return found is not None and (int(found[1]), int(found[2])) >= SINCE


def probe_of(body: bytes) -> bytes | None:
    """Return a request with the same prompt that reports what it finds; None where the body is none to repeat.

    What makes the prompt is not even decoded: it may be long, and requests wait meanwhile.
    """
    try:
        request = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, RecursionError):
        return None
    probe: dict[str, object] = {name: value for name, value in request.items() if name in _KEPT}
    probe |= {"max_tokens": 1, "session_id": REPORT_SESSION, "vllm_xargs": {"kv_cache_report_mode": "full"}}
    return msgspec.json.encode(probe)
