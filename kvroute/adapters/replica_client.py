"""Small questions to a replica: is it well, which models, which metrics, which tokens. Never a client's request.

Every answer is bounded in size and time, and every failure is one exception, ReplicaFailed.
"""

from __future__ import annotations

from typing import Any

import aiohttp
import msgspec

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
        return await self._read("POST", path, ANSWER_BYTES_MAX, data=body)

    async def _read(self, method: str, path: str, bytes_max: int, **send: Any) -> bytes:
        headers = {**self._headers, "Content-Type": "application/json"}
        try:
            async with self._session.request(
                method, self.url + path, headers=headers, timeout=self._timeout, allow_redirects=False, **send
            ) as answer:
                body = await _bounded(answer.content, bytes_max, self.url + path)
                if answer.status != 200:
                    raise ReplicaBroke(f"{path} answered {answer.status}", replica=self.url)
                return body
        except TimeoutError:
            raise ReplicaTimedOut(f"{path} did not answer in {self._timeout.total} s", replica=self.url) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplicaUnreachable(f"{path}: {str(error) or type(error).__name__}", replica=self.url) from None


async def _bounded(content: aiohttp.StreamReader, bytes_max: int, what: str) -> bytes:
    parts: list[bytes] = []
    size = 0
    async for part in content.iter_any():
        size += len(part)
        if size > bytes_max:
            raise ReplicaBroke(f"{what} sent more than {bytes_max} bytes", replica=what)
        parts.append(part)
    return b"".join(parts)
