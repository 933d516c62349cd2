"""Recorded exchanges with a real vLLM server, and what it takes to compare answers with them."""

from __future__ import annotations

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct

RECORDED = Path(__file__).parent.parent / "data" / "wire"


class Answer(Struct, frozen=True):
    """A whole answer."""

    status: int
    content_type: str | None
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The events of a stream; the end mark stays a string."""
        parts = self.body.removesuffix("\n\n").split("\n\n")
        assert all(part.startswith("data: ") for part in parts), self.body
        data = [part.removeprefix("data: ") for part in parts]
        return [part if part == "[DONE]" else json.loads(part) for part in data]


class Exchange(Struct, frozen=True):
    """A request and its answer."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    answer: Answer


def recorded(name: str) -> Exchange:
    """Read a recorded exchange."""
    request, answer = (RECORDED / f"{name}.txt").read_bytes().split(b"-" * 60 + b"\n")
    first, headers, body = _parts(request)
    status, answer_headers, answer_body = _parts(answer)
    if answer_headers.get("transfer-encoding") == "chunked":
        answer_body = _unchunked(answer_body)
    method, path, _ = first.split(" ")
    sent = {key: headers[key] for key in ("content-type", "x-request-id") if key in headers}
    came = Answer(int(status.split(" ")[1]), answer_headers.get("content-type"), answer_body.decode())
    return Exchange(method, path, sent, body.removesuffix(b"\n"), came)


async def replayed(session: aiohttp.ClientSession, exchange: Exchange) -> Answer:
    """Send a recorded request to another server."""
    headers = exchange.headers
    data = exchange.body if exchange.method == "POST" else None
    async with session.request(exchange.method, exchange.path, data=data, headers=headers) as response:
        return Answer(response.status, response.headers.get("content-type"), await response.text())


def shape(value: Any) -> Any:
    """Reduce a JSON value to its keys, in order, and the types of its leaves. Lists keep one of equal neighbours."""
    if isinstance(value, dict):
        return [(key, shape(item)) for key, item in value.items()]
    if isinstance(value, list):
        return [kind for kind, _ in groupby(map(shape, value))]
    return type(value).__name__


def _parts(raw: bytes) -> tuple[str, dict[str, str], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = {key.lower(): value for key, _, value in (line.partition(": ") for line in lines)}
    return first, headers, body


def _unchunked(raw: bytes) -> bytes:
    body = b""
    while raw.strip():
        size, _, raw = raw.partition(b"\r\n")
        count = int(size, 16)
        body, raw = body + raw[:count], raw[count + 2 :]
    return body
