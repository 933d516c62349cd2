"""What the router costs beside a bare relay: CPU per request and per streamed chunk, tokenising and index included.

    python benchmarks/overhead.py [--quick]

Router and relay share one core and take turns, round by round; load, engines and store run on another, as a store
does in production. Both relay the same requests. CPU is what the process itself used by the scheduler's clock; the
store's is printed apart. The engines cost less than either and state for each request the usage of a real engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from _load import Kind, Writer, send
from _rig import (
    LOAD_CORE,
    ROUTER_CORE,
    Program,
    Router,
    corpus,
    descendants,
    free_port,
    pinned,
    spent,
    write_model,
)
from report import Figure, conclude
from tokenizers import Tokenizer

HERE = Path(__file__).parent
ENGINES = 2
CONNECTIONS = 16
GROWING_MAX, NEW_MAX, CHUNK_MAX = 1.6, 2.5, 1.6  # times the relay's CPU
KINDS = {
    "growing_2kb": (Kind("growing_2kb", 2_000, turns=9), 60, GROWING_MAX),  # conversations a round, bar
    "growing_32kb": (Kind("growing_32kb", 32_000, turns=9), 40, GROWING_MAX),
    "new_2kb": (Kind("new_2kb", 2_000, turns=1), 400, NEW_MAX),
    "new_32kb": (Kind("new_32kb", 32_000, turns=1), 240, NEW_MAX),
    "chunk": (Kind("chunk", 2_000, turns=1, is_stream=True), 32, CHUNK_MAX),
}
CHUNKS = 202  # of a stream: each of the engine's events, the usage, the end


class Bench:
    """Engines, relay and router, all running and as fresh as they start."""

    def __init__(self, stack: ExitStack, folder: Path, model: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self.corpus = "\n".join(corpus())
        ports = [free_port() for _ in range(ENGINES)]
        for port in ports:
            engine = Program(script("_engine.py", port), folder / f"engine{port}.log")
            stack.callback(engine.stop)
            pinned(engine, LOAD_CORE).said("engine on")
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        self.relay_port = free_port()
        self.relay = Program(script("_relay.py", self.relay_port, *urls), folder / "relay.log")
        stack.callback(self.relay.stop)
        pinned(self.relay, ROUTER_CORE).said("relay on")
        self.router = Router("--tokenizer", str(model), *urls, log=folder / "router.log")
        stack.callback(self.router.stop)
        pinned(self.router, ROUTER_CORE)
        self.router_port = int(self.router.url.rpartition(":")[2])
        self.stores = [pid for pid in descendants(self.router.pid) if is_store(pid)]
        for store in self.stores:  # as in production: Redis has a core of its own, or at least not the router's
            os.sched_setaffinity(store, LOAD_CORE)

    def round(self, kind: Kind, conversations: int, seed: int) -> dict[str, float]:
        """Send the same requests through both, in an order that flips each round; CPU seconds a request or chunk."""
        writer = Writer(self.tokenizer, self.corpus, seed)
        made = [writer.conversation(kind) for _ in range(conversations)]
        cost = {}
        for who in ("relay", "router") if seed % 2 else ("router", "relay"):
            port, program = (self.relay_port, self.relay) if who == "relay" else (self.router_port, self.router)
            pids = [program.pid, *(self.stores if who == "router" else [])]
            if kind.turns > 1:  # the first turn of a conversation is wholly new
                self.relayed(port, [requests[:1] for requests in made])
            measured = [requests[1:] if kind.turns > 1 else requests for requests in made]
            used, answered = spent(pids, lambda port=port, measured=measured: self.relayed(port, measured))  # type: ignore[misc]
            units = answered * (CHUNKS if kind.is_stream else 1)
            cost[who] = used[0] / units
            if who == "router":
                cost["store"] = sum(used[1:]) / units
        return cost

    @staticmethod
    def relayed(port: int, conversations: list[list[bytes]]) -> int:
        return asyncio.run(send(port, conversations, CONNECTIONS))


def script(name: str, *args: object) -> list[str]:
    return [sys.executable, str(HERE / name), *map(str, args)]


def is_store(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text().strip() in {"valkey-server", "redis-server"}


def figures(folder: Path, rounds: int, share: float) -> Iterator[Figure]:
    """Measure every kind: what both cost, their ratio, and the store's part."""
    model = write_model(folder / "model")
    for name, (kind, conversations, bar) in KINDS.items():
        count = max(4, round(conversations * share))
        with ExitStack() as stack:  # a router of its own for each kind: none pays for what another left to be done
            bench = Bench(stack, folder, model)
            bench.round(kind, max(4, count // 4), seed=0)  # warms up: connections, caches, learnt rates
            costs = [bench.round(kind, count, seed) for seed in range(1, rounds + 1)]
        for who in ("relay", "router", "store"):
            yield Figure(f"{name}_{who}_cpu", 1e6 * statistics.median(cost[who] for cost in costs), "us")
        ratios = [cost["router"] / cost["relay"] for cost in costs]
        yield Figure(f"{name}_router_over_relay", statistics.median(ratios), "x", at_most=bar)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter rounds")
    quick = parser.parse_args().quick
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as folder:
        return conclude(figures(Path(folder), rounds=3 if quick else 9, share=0.5 if quick else 1.0))


if __name__ == "__main__":
    sys.exit(main())
