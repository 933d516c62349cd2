"""The baseline: a bare relay with aiohttp on both sides that takes replicas in turn. It decides and counts nothing.

It runs as aiohttp comes, on asyncio's own event loop. On uvloop, which the router uses, it costs 10 to 15 % less.

python benchmarks/_relay.py PORT URL...
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import AsyncIterator

from aiohttp import ClientSession, ClientTimeout, TCPConnector, web

PORT, URLS = int(sys.argv[1]), itertools.cycle(sys.argv[2:])
SESSION = web.AppKey("session", ClientSession)


async def relay(request: web.Request) -> web.StreamResponse:
    body = await request.read()
    headers = {"Content-Type": request.content_type}
    async with request.app[SESSION].post(next(URLS) + request.path, data=body, headers=headers) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.headers["Content-Type"]})
        if answer.content_length is not None:
            response.content_length = answer.content_length
        await response.prepare(request)
        async for chunk in answer.content.iter_any():
            await response.write(chunk)
        return response


async def client(app: web.Application) -> AsyncIterator[None]:
    async with ClientSession(connector=TCPConnector(limit=0), timeout=ClientTimeout()) as app[SESSION]:
        yield


app = web.Application(client_max_size=1 << 26)
app.cleanup_ctx.append(client)
app.router.add_post("/v1/{path:.*}", relay)
web.run_app(app, host="127.0.0.1", port=PORT, access_log=None, print=lambda _: print(f"relay on {PORT}", flush=True))
