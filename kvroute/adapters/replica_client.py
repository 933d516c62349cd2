"""Small questions to a replica: is it well, which models, which metrics, which tokens. Never a client's request.

Every answer is bounded in size and time, and every failure is one exception, ReplicaFailed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import aiohttp
import msgspec
from msgspec import Struct

from kvroute.adapters.vllm_metrics import PAGE_BYTES_MAX, Page, read_page
from kvroute.errors import ReplicaBroke, ReplicaFailed, ReplicaTimedOut, ReplicaUnreachable
from kvroute.routing.replica import ModelCard

ANSWER_BYTES_MAX = 64 << 20  # a /tokenize answer: about seven bytes a token


class _Card(msgspec.Struct):
    id: str
    max_model_len: int | None = None
    root: str | None = None
    parent: str | None = None


class _Cards(msgspec.Struct):
    data: list[_Card]


class Answered(Struct, frozen=True):
    """An answer of any status."""

    status: int
    body: bytes
    date: str | None = None  # its Date header


class ReplicaClient:
    """Asks one replica, with the key that it wants."""

    def __init__(self, session: aiohttp.ClientSession, url: str, api_key: str | None, timeout_s: float) -> None:
        self.url = url
        self._session = session
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._timeout = aiohttp.ClientTimeout(total=timeout_s)

    async def ailment(self) -> str:
        """Return why /health does not say 200, "" where it does."""
        try:
            await self._read("GET", "/health", ANSWER_BYTES_MAX)
        except ReplicaFailed as error:
            return str(error)
        return ""

    async def cards(self) -> tuple[ModelCard, ...]:
        """Return what /v1/models lists.

        Raises:
            ReplicaFailed: it did not answer, or with something else.
        """
        body = await self._read("GET", "/v1/models", ANSWER_BYTES_MAX)
        try:
            found = msgspec.json.decode(body, type=_Cards).data
        except (msgspec.ValidationError, msgspec.DecodeError) as error:
            raise ReplicaBroke(f"/v1/models is not a list of models: {error}", replica=self.url) from None
        return tuple(ModelCard(card.id, card.max_model_len, card.root, card.parent) for card in found)

    async def page(self, now: float) -> Page:
        """Return what /metrics says.

        Raises:
            ReplicaFailed: it did not answer, or with something else.
        """
        body = await self._read("GET", "/metrics", PAGE_BYTES_MAX)
        try:
            return read_page(body.decode("utf-8", "replace"), now)
        except ValueError as error:
            raise ReplicaBroke(f"/metrics cannot be read: {error}", replica=self.url) from None

    async def ask(self, path: str, body: bytes) -> bytes:
        """Post JSON and return the answer.

        Raises:
            ReplicaFailed: it did not answer with 200 in time.
        """
        return await self._read("POST", path, ANSWER_BYTES_MAX, body)

    async def answered(
        self,
        method: str,
        path: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        bytes_max: int = ANSWER_BYTES_MAX,
    ) -> Answered:
        """Ask anything and return the answer, whatever its status.

        Raises:
            ReplicaFailed: it did not answer in time, or with more than `bytes_max`.
        """
        sent = {**self._headers, "Content-Type": "application/json", **(headers or {})}
        try:
            async with self._session.request(
                method, self.url + path, headers=sent, timeout=self._timeout, allow_redirects=False, data=body
            ) as answer:
                read = await _bounded(answer.content, bytes_max, self.url + path)
                return Answered(answer.status, read, answer.headers.get("Date"))
        except TimeoutError:
            raise ReplicaTimedOut(f"{path} did not answer in {self._timeout.total} s", replica=self.url) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaUnreachable(f"{path}: {_why(error)}", replica=self.url) from None

    async def _read(self, method: str, path: str, bytes_max: int, body: bytes | None = None) -> bytes:
        answer = await self.answered(method, path, body=body, bytes_max=bytes_max)
        if answer.status != 200:
            raise ReplicaBroke(f"{path} answered {answer.status}", replica=self.url)
        return answer.body


def _why(error: aiohttp.ClientError | OSError) -> str:
    """Say why there was no answer: the system's own words where it has some, such as Connection refused."""
    if not isinstance(error, aiohttp.ClientConnectorError):
        return str(error) or type(error).__name__
    cause = error.os_error
    if isinstance(error, aiohttp.ClientSSLError) or not cause.errno:  # TLS has error numbers of its own
        return str(cause)
    return os.strerror(cause.errno) if cause.errno > 0 else str(cause.strerror)  # names have negative ones


async def _bounded(content: aiohttp.StreamReader, bytes_max: int, what: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        size += len(part)
        if size > bytes_max:
            raise ReplicaBroke(f"{what} sent more than {bytes_max} bytes", replica=what)
        parts.append(part)
    return b"".join(parts)
