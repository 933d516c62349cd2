"""What the router keeps in memory: for silent connections, for streams under way, and for prompts that it has seen.

    python benchmarks/memory.py [--quick]

Resident memory of the router's process, and beside it what its private store says that it uses. Each part begins when
the one before has gone and its connections with it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from _load import Kind, Writer, send
from _rig import LOAD_CORE, ROUTER_CORE, Program, Router, corpus, descendants, free_port, pinned, write_model
from report import Figure, conclude
from tokenizers import Tokenizer

from tests.admin import metric, until

HERE = Path(__file__).parent
CONNECTIONS = 16
IDLE, STREAMS = 10_000, 2_000
CHUNK_S = 0.5  # between two events of a stream: memory is asked for, not speed
SETTLE_S = 1.0
PROMPT_MAX_KIB = 20.0  # router and store together, for a prompt of 32 KB
PROMPT_BYTES = 32_000


def rss_kib(pid: int) -> float:
    """Return a process's resident memory."""
    found = re.search(r"^VmRSS:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    assert found is not None, f"process {pid} has no memory"
    return float(found[1])


class Bench:
    """Two engines, a router before them, and its store."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        model = write_model(folder / "model")
        self.writer = Writer(Tokenizer.from_file(str(model / "tokenizer.json")), "\n".join(corpus()), seed=1)
        ports = [free_port() for _ in range(2)]
        for port in ports:
            command = [sys.executable, str(HERE / "_engine.py"), str(port), "", str(CHUNK_S)]
            engine = Program(command, folder / f"engine{port}.log")
            stack.callback(engine.stop)
            pinned(engine, LOAD_CORE).said("engine on")
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.router = Router("--tokenizer", str(model), *urls, log=folder / "router.log")
        stack.callback(self.router.stop)
        pinned(self.router, ROUTER_CORE)
        self.port = int(self.router.url.rpartition(":")[2])
        self.socket = self._store()

    def _store(self) -> str:
        """Return the socket of the router's private store."""
        for pid in descendants(self.router.pid):
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
            if found := re.search(r"unixsocket[: ]+(\S+)", words):
                return found[1]
        raise RuntimeError("the router has no private store")

    def router_kib(self) -> float:
        time.sleep(SETTLE_S)
        return rss_kib(self.router.pid)

    def store_kib(self) -> float:
        import redis

        return float(redis.Redis(unix_socket_path=self.socket).info("memory")["used_memory"]) / 1024

    def emptied(self) -> None:
        """Wait until no client is connected any more."""
        left = until(lambda: metric(self.router.admin, "kvroute_connections", side="clients"), lambda n: n == 0, 30.0)
        if left:
            raise RuntimeError(f"{left:g} connections are still open")

    def ask(self, requests: list[bytes]) -> None:
        asyncio.run(send(self.port, [[request] for request in requests], CONNECTIONS))

    def new(self, count: int, kind: Kind) -> list[bytes]:
        return [self.writer.conversation(kind)[0] for _ in range(count)]


async def idle(bench: Bench, count: int) -> float:
    """Return the memory while so many connections are open and silent."""
    loop = asyncio.get_running_loop()
    opened = []
    for _ in range(0, count, 100):
        opened += await asyncio.gather(
            *[loop.create_connection(asyncio.Protocol, "127.0.0.1", bench.port) for _ in range(100)]
        )
    used = await asyncio.to_thread(bench.router_kib)
    for transport, _ in opened:
        transport.abort()
    return used


async def streams(bench: Bench, requests: list[bytes]) -> float:
    """Return the memory while all of the requests are being answered, event by event."""
    opened = []
    for request in requests:
        reading, writing = await asyncio.open_connection("127.0.0.1", bench.port)
        writing.write(request)
        opened.append((reading, writing))
    for reading, _ in opened:
        assert (await reading.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200")
    used = await asyncio.to_thread(bench.router_kib)
    for _, writing in opened:
        writing.transport.abort()
    return used


def figures(folder: Path, share: float) -> Iterator[Figure]:
    """Measure one part after the other."""
    with ExitStack() as stack:
        bench = Bench(stack, folder)
        small = Kind("small", 2_000, turns=1)
        bench.ask(bench.new(200, small))
        start = bench.router_kib()
        yield Figure("router_start", start / 1024, "MiB")

        connections = int(IDLE * share)
        used = asyncio.run(idle(bench, connections))
        yield Figure(f"router_{connections}_idle_connections", used / 1024, "MiB")
        yield Figure("idle_connection", (used - start) / connections, "KiB")
        bench.emptied()

        before, number = bench.router_kib(), int(STREAMS * share)
        used = asyncio.run(streams(bench, bench.new(number, Kind("stream", 2_000, turns=1, is_stream=True))))
        yield Figure(f"router_{number}_streams", used / 1024, "MiB")
        yield Figure("stream", (used - before) / number, "KiB")
        bench.emptied()

        large, prompts = Kind("large", PROMPT_BYTES, turns=1), int(2_000 * share)
        bench.ask(bench.new(prompts // 4, large))  # buffers grow to what large bodies need
        before, stored = bench.router_kib(), bench.store_kib()
        bench.ask(bench.new(prompts, large))
        router = (bench.router_kib() - before) / prompts
        store = (bench.store_kib() - stored) / prompts
        yield Figure("prompt_32kb_router", router, "KiB")
        yield Figure("prompt_32kb_store", store, "KiB")
        yield Figure("prompt_32kb", router + store, "KiB", at_most=PROMPT_MAX_KIB)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a quarter of everything")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as folder:
        return conclude(figures(Path(folder), 0.25 if quick else 1.0))


if __name__ == "__main__":
    sys.exit(main())
