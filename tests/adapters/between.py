"""A server between a client and replicas, as balancers and gateways are: it takes turns, and may change answers."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

Edit = Callable[[str, int, bytes], tuple[int, bytes]]  # path, status, body -> status, body


def unchanged(path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return status, body


@asynccontextmanager
async def between(urls: list[str], edit: Edit = unchanged) -> AsyncIterator[str]:
    """Serve before `urls`, chats one after the other to each; yields the URL."""
    turns = itertools.cycle(urls)
    async with aiohttp.ClientSession() as session:

        async def handler(request: web.BaseRequest) -> web.Response:
            url = next(turns) if request.path.endswith("/completions") else urls[0]
            sent = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.request(request.method, url + request.path, data=sent, headers=headers) as answer:
                status, body = edit(request.path, answer.status, await answer.read())
                return web.Response(status=status, body=body)

        runner = web.ServerRunner(web.Server(handler))
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
