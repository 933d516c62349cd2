"""What it costs to follow engines' KV events into the shared index, from ZeroMQ frames to cells in Redis.

Throughput: engines publish as fast as they can; router, engines and Redis are processes of their own, and the router
has one core. Stored and removed blocks are counted from the first frame to the last cell that Redis has acknowledged.
`events_blocks_per_router_cpu_s` is the rate that one core of the router's gives; `events_blocks_per_s` is by the clock,
and shares two cores with everything else that runs.
Latency: requests of 2 KB, new from their first word, through a router before the same engines, each beside the same
request to an engine; without events and at 30,000 blocks a second, in turns.

    python benchmarks/events.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
import tracemalloc
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import uvloop
from _events import BLOCK_SIZE, CAPACITY, PROMPT_BLOCKS, SHARED_BLOCKS, STEP_BLOCKS, encode, stored
from _load import Kind, Writer
from _rig import LOAD_CORE, ROUTER_CORE, Program, Router, corpus, descendants, free_port, pinned, write_model
from _store import served
from report import Figure, conclude
from tokenizers import Tokenizer

from kvroute.adapters.event_feed import EventFeed
from kvroute.adapters.index import Namespace
from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.redis_wire import Wire
from kvroute.adapters.vllm_events import EventStream
from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.event_sequence import EventSink, Position
from kvroute.kv.events import decode_batch
from kvroute.routing.replica import ReplicaId
from tests.admin import fetch, until

HERE = Path(__file__).parent
NS = Namespace("bench")
ENGINES = 16
RATE_MIN = 120_000
EVENTS_PER_S, REQUESTS_PER_S, PART_S, LATENCY_MAX = 30_000, 50, 1.0, 1.5
BLOCKS_PER_STEP = 2 * (PROMPT_BLOCKS - SHARED_BLOCKS) / -(-(PROMPT_BLOCKS - SHARED_BLOCKS) // STEP_BLOCKS)  # on average


class Engines:
    """The publishing process."""

    def __init__(self, steps: int, blocks_per_s: int = 0, parts: int = 1) -> None:
        command = [sys.executable, str(HERE / "_events.py"), *map(str, (ENGINES, steps, blocks_per_s, parts))]
        os.sched_setaffinity(0, LOAD_CORE)
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.endpoints = [self.line() for _ in range(ENGINES)]
        assert self.line() == "ready"

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    async def play(self) -> int:
        """Begin the next part; return how many blocks it changed, once it is sent."""
        self.tell()
        return int(await asyncio.to_thread(self.line))

    def tell(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()

    def close(self) -> None:
        self.tell()
        self._process.wait(timeout=10)


def follow(index: RedisIndex, endpoints: list[str]) -> list[EventFeed]:
    feeds = []
    for number, endpoint in enumerate(endpoints):

        def opened(sink: EventSink, position: Position | None, endpoint: str = endpoint) -> EventStream:
            return EventStream(endpoint, sink=sink, position=position)

        replica = ReplicaId(f"r{number}")
        feeds.append(EventFeed("m", CAPACITY, opened))
        index.join(replica, NS, CAPACITY)
        index.follow(replica, feeds[-1])
    return feeds


async def written(index: RedisIndex, feeds: list[EventFeed], changed: int) -> None:
    """Wait until the feeds have heard of so many blocks, and Redis has all of them."""
    (shard,) = index._shards[NS]
    writers = [member.writer for member in shard.members.values() if member.writer]
    while True:
        told = sum(feed.table.counters.stored + feed.table.counters.removed for feed in feeds)
        is_idle = not any(w.waiting or w.is_under_way or w.feed.table.tree.changes[0] for w in writers)
        if told >= changed and is_idle:
            return
        await asyncio.sleep(0.005)


async def used_bytes(wire: Wire) -> int:
    text: bytes = await wire.command("INFO", "memory")
    return int(dict(line.split(":", 1) for line in text.decode().splitlines() if ":" in line)["used_memory"])


async def throughput(steps: int) -> list[Figure]:
    engines = Engines(steps)
    async with served() as (index, wire):
        empty = await used_bytes(wire)
        os.sched_setaffinity(0, ROUTER_CORE)  # the server, started before, stays on the other one
        feeds = follow(index, engines.endpoints)
        while index.stats.owned_replicas < ENGINES:  # noqa: ASYNC110 - nothing tells, and a benchmark may poll
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.5)  # subscriptions need a moment to reach the publishers
        warm = await engines.play()
        await written(index, feeds, warm)
        cpu_s, wall_s = time.process_time(), time.perf_counter()
        changed = await engines.play()
        await written(index, feeds, warm + changed)
        cpu_s, wall_s = time.process_time() - cpu_s, time.perf_counter() - wall_s
        gaps = sum(feed.counters.gaps for feed in feeds)
        entries = sum(len(feed.table.tree.cells[0]) for feed in feeds)
        redis_bytes = await used_bytes(wire) - empty
    engines.close()
    return [
        Figure("events_blocks_per_router_cpu_s", changed / cpu_s, "blocks/s", at_least=RATE_MIN),
        Figure("events_blocks_per_s", changed / wall_s, "blocks/s"),
        Figure("events_router_cpu_per_block", 1e6 * cpu_s / changed, "us"),
        Figure("events_gaps", gaps, "gaps", at_most=0),
        Figure("events_redis_bytes_per_block", redis_bytes / entries, "B"),
        Figure("events_router_bytes_per_entry", entry_bytes(50_000), "B"),
    ]


def entry_bytes(blocks: int) -> float:
    """Return what the router keeps for each block of an engine, all tables and arrays counted."""
    tracemalloc.start()
    table = EngineHashes("m", blocks)
    for number in range(0, blocks, STEP_BLOCKS):
        hashes = [random.getrandbits(64) for _ in range(STEP_BLOCKS)]
        ids = [number + i for i in range(STEP_BLOCKS * BLOCK_SIZE)]
        table.apply(decode_batch(encode([stored(hashes, None, ids)])))
        table.changes()
    del hashes, ids
    used = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return used / len(table)


async def latency(folder: Path, parts: int) -> list[Figure]:
    """Measure what the router adds to a request, in turns without events and at EVENTS_PER_S."""
    steps = round(PART_S * EVENTS_PER_S / ENGINES / BLOCKS_PER_STEP)
    model = write_model(folder / "model")
    writer = Writer(Tokenizer.from_file(str(model / "tokenizer.json")), "\n".join(corpus()), seed=1)
    kind = Kind("new_2kb", 2_000, turns=1)
    quiet: list[float] = []
    loud: list[float] = []
    with ExitStack() as stack:
        engines = Engines(steps, EVENTS_PER_S, parts)
        stack.callback(engines.close)
        ports = [free_port() for _ in range(ENGINES)]
        for port, endpoint in zip(ports, engines.endpoints, strict=True):
            program = Program([sys.executable, str(HERE / "_engine.py"), str(port), endpoint], folder / f"{port}.log")
            stack.callback(program.stop)
            pinned(program, LOAD_CORE).said("engine on")
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        router = Router("--tokenizer", str(model), *urls, log=folder / "router.log")
        stack.callback(router.stop)
        pinned(router, ROUTER_CORE)
        move_stores(router)
        await engines.play()
        until(lambda: exact(router), lambda states: states == {"exact"}, 10)
        assert exact(router) == {"exact"}, exact(router)
        for _ in range(parts):
            for told in (quiet, loud):
                playing = asyncio.ensure_future(engines.play()) if told is loud else None
                told += await added(writer, kind, int(router.url.rpartition(":")[2]), ports[0])
                if playing is not None:
                    await playing
    before, with_events = statistics.median(quiet), statistics.median(loud)
    return [
        Figure("events_added_latency_quiet", 1e6 * before, "us"),
        Figure("events_added_latency_at_30k", 1e6 * with_events, "us"),
        Figure("events_added_latency_ratio", with_events / before, "x", at_most=LATENCY_MAX),
    ]


def move_stores(router: Router) -> None:
    """Give Redis a core that is not the router's, as in production."""
    for pid in descendants(router.pid):
        if Path(f"/proc/{pid}/comm").read_text().strip() in {"valkey-server", "redis-server"}:
            os.sched_setaffinity(pid, LOAD_CORE)


def exact(router: Router) -> set[str]:
    return {row["events"] for row in json.loads(fetch(router.admin + "/admin/index"))["replicas"]}


async def added(writer: Writer, kind: Kind, router_port: int, engine_port: int) -> list[float]:
    """Send RATE requests a second through the router and to an engine, in turns; return what each pair differs by."""
    through, direct = [await asyncio.open_connection("127.0.0.1", port) for port in (router_port, engine_port)]
    began_s, differences = time.perf_counter(), []
    for number in range(int(PART_S * REQUESTS_PER_S)):
        (request,) = writer.conversation(kind)
        await asyncio.sleep(began_s + number / REQUESTS_PER_S - time.perf_counter())
        took = [await asked(connection, request) for connection in (through, direct)]
        differences.append(took[0] - took[1])
    for _, writing in (through, direct):
        writing.close()
    return differences


async def asked(connection: tuple[asyncio.StreamReader, asyncio.StreamWriter], request: bytes) -> float:
    began_s = time.perf_counter()
    reading, writing = connection
    writing.write(request)
    head = await reading.readuntil(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200"), head
    await reading.readexactly(int(head.lower().partition(b"content-length:")[2].split(b"\r\n", 1)[0]))
    return time.perf_counter() - began_s


async def measure(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as folder:
        return await throughput(300 if quick else 600) + await latency(Path(folder), 7 if quick else 10)


def main() -> int:
    parser: Any = argparse.ArgumentParser(description="KV events into the shared index.")
    parser.add_argument("--quick", action="store_true", help="fewer steps")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return conclude(runner.run(measure(parser.parse_args().quick)))


if __name__ == "__main__":
    sys.exit(main())
