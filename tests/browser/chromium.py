"""A headless Chromium that tests drive over its DevTools protocol: open a page, wait for it, look at it.

Source: https://chromedevtools.github.io/devtools-protocol/. Chromium writes the port that it listens on into the file
DevToolsActivePort of its profile. One websocket, JSON messages with ids; events are kept where they tell of a mistake.
"""

from __future__ import annotations

import asyncio
import base64
import itertools
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
STARTED_S = 60.0
PATIENCE_S = 30.0
MESSAGE_BYTES_MAX = 64 << 20  # a picture comes in one message


def chromium() -> str | None:
    """Return the path of a browser, None where there is none."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One tab."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self.faults: list[str] = []  # exceptions and errors that the page's scripts ran into, and failed loads
        self._socket = socket
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[dict[str, Any]]] = {}

    async def listen(self) -> None:
        """Take in what the browser says, until it is gone."""
        async for message in self._socket:
            said = message.json()
            if (answer := self._answers.pop(said.get("id"), None)) is not None and not answer.done():
                answer.set_result(said)
            elif said.get("method") == "Runtime.exceptionThrown":
                details = said["params"]["exceptionDetails"]
                self.faults.append(details.get("exception", {}).get("description") or details["text"])
            elif said.get("method") == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.faults.append(said["params"]["entry"]["text"])

    async def tell(self, method: str, **params: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result."""
        number = next(self._numbers)
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        async with asyncio.timeout(PATIENCE_S):
            said = await answer
        assert "error" not in said, said["error"]
        result: dict[str, Any] = said["result"]
        return result

    async def open(self, url: str, *, width: int = 1100, height: int = 900, scheme: str = "light") -> None:
        """Show a page in a window of a size, in light or dark."""
        for domain in ("Page", "Runtime", "Log"):
            await self.tell(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.tell("Emulation.setDeviceMetricsOverride", **size)
        await self.tell("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        await self.tell("Page.navigate", url=url)

    async def value(self, expression: str) -> Any:
        """Return what an expression is in the page."""
        said = await self.tell("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in said, said["exceptionDetails"]
        return said["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait until an expression is true in the page, and return it."""
        async with asyncio.timeout(PATIENCE_S):
            while not (found := await self.value(expression)):
                await asyncio.sleep(0.05)
        return found

    async def picture(self) -> bytes:
        """Return the whole page as PNG."""
        said = await self.tell("Page.captureScreenshot", captureBeyondViewport=True)
        return base64.b64decode(said["data"])


@asynccontextmanager
async def page(profile: Path) -> AsyncIterator[Page]:
    """Start a browser with an empty profile, and stop it at the end."""
    path = chromium()
    assert path is not None, "no browser: apt-get install chromium"
    process = await asyncio.create_subprocess_exec(
        *(path, "--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}", "--no-first-run"),
        *("--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),  # containers
        "about:blank",
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await _port(profile / "DevToolsActivePort")
        async with aiohttp.ClientSession() as http:
            async with http.get(f"http://127.0.0.1:{port}/json/list") as answer:
                (target,) = [each for each in await answer.json() if each["type"] == "page"]
            async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=MESSAGE_BYTES_MAX) as socket:
                made = Page(socket)
                listener = asyncio.create_task(made.listen())
                yield made
                listener.cancel()
    finally:
        process.terminate()
        await process.wait()


async def _port(file: Path) -> int:
    async with asyncio.timeout(STARTED_S):
        while not (words := _words(file)):
            await asyncio.sleep(0.05)
    return int(words[0])


def _words(file: Path) -> list[str]:
    return file.read_text().split() if file.exists() else []
