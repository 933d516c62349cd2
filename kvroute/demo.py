"""`kvroute demo`: simulated replicas, the router and some traffic on this machine, each as a process of its own.

It runs the commands that a user would run, so what it shows is what a user gets. The same traffic goes through twice,
first round robin, then by prefix, so that the hit rate has something to stand beside.
"""

from __future__ import annotations

import asyncio
import random
import signal
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 8.0
CONCURRENT = 8  # conversations at once
TURNS = 6  # requests a conversation
GROUPS = 6  # distinct system prompts
SYSTEM_WORDS = 900  # length of a system prompt
KV_TOKENS = 60_000  # cache of a replica: holds some of the conversations, not all
WORDS = ("cache", "block", "prefix", "token", "route", "replica", "prompt", "answer", "model", "batch", "queue")


def run_demo(*, replicas: int, requests: int, port: int, admin_port: int, leave: bool) -> int:
    """Run the demonstration until Ctrl-C, or until the traffic is over where `leave` is set. Returns an exit status."""
    console = Console(highlight=False)
    try:
        asyncio.run(_demo(console, replicas, requests, port, admin_port, leave))
    except KeyboardInterrupt:
        console.print("stopped")
    except DemoFailed as error:
        console.print(f"[red]Error: {error}[/red]", soft_wrap=True)
        return 1
    return 0


class DemoFailed(Exception):
    """A process of the demonstration did not come up, or nothing was answered."""


async def _demo(console: Console, replicas: int, requests: int, port: int, admin_port: int, leave: bool) -> None:
    stop = asyncio.Event()
    for signum in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    _check_ports(port, admin_port)
    reports: dict[str, dict[str, Any]] = {}
    for policy in ("round-robin", "kvroute"):
        last = policy == "kvroute"
        ports = (port, admin_port) if last else (0, 0)
        async with _pool(console, replicas, policy, ports) as (url, admin):
            console.print(f"[bold]{policy}[/bold]: {requests} requests in conversations of {TURNS} turns ...")
            answered = await _until(stop, _traffic(url, requests))
            if answered is None:
                return
            reports[policy] = await _hit_rate(admin) | {"answered": answered, "asked": requests}
            if last:
                _show(console, reports, url, admin)
                if not leave:
                    body = '{"model": "sim", "messages": [{"role": "user", "content": "Hello"}]}'
                    kind = "content-type: application/json"
                    console.print(f"try       curl {url}/v1/chat/completions -H '{kind}' -d '{body}'", soft_wrap=True)
                    console.print("Press Ctrl-C to stop.")
                    await stop.wait()


def _check_ports(*ports: int) -> None:
    """Find out before any work whether the listeners of the last part can be had."""
    for port, flag in zip(ports, ("--port", "--admin-port"), strict=True):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError as error:
                raise DemoFailed(
                    f"port {port}: {error.strerror}; choose another with `kvroute demo {flag} N`"
                ) from None


async def _until(stop: asyncio.Event, work: Any) -> Any:
    """Return what `work` returns, or None where `stop` was set first."""
    working, stopping = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    for future in (working, stopping):
        future.cancel()
    results = await asyncio.gather(working, stopping, return_exceptions=True)
    if isinstance(results[0], asyncio.CancelledError):
        return None
    if isinstance(results[0], BaseException):
        raise results[0]
    return results[0]


@asynccontextmanager
async def _pool(console: Console, replicas: int, policy: str, ports: tuple[int, int]) -> AsyncIterator[tuple[str, str]]:
    """Start the replicas and a router before them; yield the router's and the admin's URL; stop everything."""
    processes: list[asyncio.subprocess.Process] = []
    try:
        urls = []
        for _ in range(replicas):
            line = await _start(processes, "replica", "--port", "0", "--kv-tokens", str(KV_TOKENS), "--speed", "4")
            urls.append(line.split()[-1])
        line = await _start(
            processes, "serve", "--port", str(ports[0]), "--admin-port", str(ports[1]), "--policy", policy,
            "--workers", "1", *urls,  # replicas and traffic need the other cores
        )  # fmt: skip
        addresses = [word.rstrip(",") for word in line.split() if word.startswith("http")]
        yield addresses[0], addresses[1]
    finally:
        await _stop(processes)


async def _start(processes: list[asyncio.subprocess.Process], *command: str) -> str:
    """Start a kvroute command and return the line that it prints when it serves."""
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the process keeps it; it has no name to be left behind
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "kvroute", *command,
        stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
    )  # fmt: skip
    processes.append(process)
    assert process.stdout is not None
    try:
        line = await asyncio.wait_for(process.stdout.readline(), START_TIMEOUT_S)
    except TimeoutError:
        raise DemoFailed(f"`kvroute {command[0]}` did not start in {START_TIMEOUT_S:.0f} s") from None
    if not line:
        await process.wait()
        errors.seek(0)
        said = errors.read().decode("utf-8", "replace").strip().splitlines()
        raise DemoFailed(f"`kvroute {command[0]}` ended at once: {said[-1] if said else 'it said nothing'}")
    return line.decode().strip()


async def _stop(processes: list[asyncio.subprocess.Process]) -> None:
    for process in reversed(processes):  # the router before its replicas
        if process.returncode is None:
            process.terminate()
    waits = [asyncio.wait_for(process.wait(), STOP_TIMEOUT_S) for process in processes]
    await asyncio.gather(*waits, return_exceptions=True)
    for process in processes:
        if process.returncode is None:
            process.kill()
            await process.wait()


async def _traffic(url: str, requests: int) -> int:
    """Hold conversations over a few shared system prompts; return how many requests were answered."""
    rng = random.Random(7)
    systems = [" ".join(rng.choices(WORDS, k=SYSTEM_WORDS)) for _ in range(GROUPS)]
    turns = [min(TURNS, requests - start) for start in range(0, requests, TURNS)]
    gate = asyncio.Semaphore(CONCURRENT)
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:

        async def converse(number: int, count: int) -> int:
            async with gate:
                return await _conversation(session, random.Random(number), systems[number % GROUPS], count)

        return sum(await asyncio.gather(*(converse(number, count) for number, count in enumerate(turns))))


async def _conversation(session: aiohttp.ClientSession, rng: random.Random, system: str, turns: int) -> int:
    messages = [{"role": "system", "content": system}]
    answered = 0
    for _ in range(turns):
        messages.append({"role": "user", "content": " ".join(rng.choices(WORDS, k=60))})
        body = {"messages": messages, "max_tokens": 32}
        async with session.post("/v1/chat/completions", json=body) as answer:
            reply = await answer.json()
            if answer.status != 200:
                raise DemoFailed(f"a request was answered with {answer.status}: {reply}")
        messages.append(reply["choices"][0]["message"])
        answered += 1
    return answered


async def _hit_rate(admin: str) -> dict[str, Any]:
    async with aiohttp.ClientSession(admin) as session, session.get("/admin/hit-rate") as answer:
        report: dict[str, Any] = await answer.json()
    return report


def _show(console: Console, reports: dict[str, dict[str, Any]], url: str, admin: str) -> None:
    table = Table(title="hit rate: share of prompt tokens that came from a replica's cache")
    table.add_column("policy")
    for column in ("answered", "prompt tokens", "reachable", "delivered", "hit rate"):
        table.add_column(column, justify="right")
    for policy, report in reports.items():
        sums = report["windows"]["all"]["total"]
        table.add_row(
            policy,
            f"{report['answered']} of {report['asked']}",
            *(f"{sums[name]:,}" for name in ("prompt_tokens", "reachable_tokens", "delivered_tokens")),
            f"{sums['hit_rate']:.3f}",
        )
    console.print(table)
    if generated := reports["kvroute"]["windows"]["all"]["total"]["generated_tokens"]:
        console.print(
            f"[dim]of kvroute's delivered tokens {generated:,} are of earlier answers, beyond what was reachable[/dim]",
            soft_wrap=True,
        )
    console.print(f"hit rate {reports['kvroute']['windows']['all']['total']['hit_rate']:.3f}")
    console.print(f"endpoint  {url}/v1/chat/completions", soft_wrap=True)
    console.print(f"admin     {admin}/ (page), {admin}/admin/hit-rate, {admin}/metrics", soft_wrap=True)
