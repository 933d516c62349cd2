"""A whole router in this process, before simulated replicas on real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.typedefs import Handler

from kvroute.config import Config, load
from kvroute.fake.server import build_replica, serve_replica
from kvroute.proxy.app import Service


def settings(urls: list[str], **overrides: Any) -> Config:
    """Return settings for free ports, a store in memory, and quick feeds."""
    given = {
        "listen.port": 0,
        "admin.port": 0,
        "store.kind": "memory",
        "feeds.metrics_interval_s": 0.05,
        "feeds.health_interval_s": 0.05,
        "proxy.log_requests": False,
        "replicas": [{"url": url} for url in urls],
        **{name.replace("__", "."): value for name, value in overrides.items()},
    }
    return load(None, env={}, overrides=given)


class Pool:
    """Simulated replicas, the router before them, and a client session."""

    def __init__(
        self, service: Service, replicas: list[tuple[web.AppRunner, str]], http: aiohttp.ClientSession
    ) -> None:
        self.service = service
        self.replicas = replicas
        self.http = http

    @property
    def urls(self) -> list[str]:
        """Return the replicas' URLs."""
        return [url for _, url in self.replicas]

    async def chat(self, text: str, **more: Any) -> dict[str, Any]:
        """Ask for a short answer and return it."""
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}
        async with self.http.post(self.service.url + "/v1/chat/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def admin(self, path: str, method: str = "GET", **more: Any) -> tuple[int, Any]:
        """Ask the admin listener; return status and JSON, or text where it is none."""
        async with self.http.request(method, self.service.admin_url + path, **more) as answer:
            is_json = answer.content_type == "application/json"
            return answer.status, await (answer.json() if is_json else answer.text())


@web.middleware
async def _no_dev_mode(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Have no routes but those that vLLM has outside of its development mode."""
    if request.path in ("/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping"):
        raise web.HTTPNotFound
    return await handler(request)


@asynccontextmanager
async def running_pool(
    count: int = 2, *, speed: float = 100.0, kv_tokens: int = 8192, dev_mode: bool = True, **overrides: Any
) -> AsyncIterator[Pool]:
    """Start replicas and a router before them, and stop all at the end."""
    apps = [build_replica(speed=speed, kv_tokens=kv_tokens) for _ in range(count)]
    if not dev_mode:
        for app in apps:
            app.middlewares.append(_no_dev_mode)
    replicas = [await serve_replica(app) for app in apps]
    service = Service(settings([url for _, url in replicas], **overrides))
    try:
        await service.start()
        async with aiohttp.ClientSession() as http:
            yield Pool(service, replicas, http)
    finally:
        await service.stop()
        for runner, _ in replicas:
            await runner.cleanup()
