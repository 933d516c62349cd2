"""What a lookup in the shared index costs, against a PING over the same Unix socket in the same run.

An 8,192-block chain, held to mixed depths by 64 replicas: 16 depths that replicas share, then 64 distinct ones. Lookups
and PINGs alternate, so that whatever else the machine does falls on both; times are medians. CPU is this process's, and
lower quartiles are compared, since other work on the machine only ever adds to it; Redis' own is printed apart.
Bytes per block: many conversations over shared system prompts, each held by one or two of 64 replicas.

    python benchmarks/index.py [--quick]
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop
from _store import served
from report import Figure, conclude

from kvroute.adapters.index import Namespace
from kvroute.adapters.redis_index import RedisIndex
from kvroute.adapters.redis_wire import Wire
from kvroute.kv.chain import PrefixChain
from kvroute.routing.replica import ReplicaId

BLOCKS, REPLICAS = 8_192, 64
NS = Namespace("bench")


async def info(wire: Wire, section: str) -> dict[str, float]:
    text: bytes = await wire.command("INFO", section)
    lines = (line.split(":", 1) for line in text.decode().splitlines() if ":" in line)
    return {name: float(value) for name, value in lines if value.replace(".", "", 1).isdigit()}


async def hold(index: RedisIndex, chain: PrefixChain, depths: list[int]) -> dict[ReplicaId, int]:
    """Have the replicas hold the chain to these depths, and wait until the index says so."""
    held = {ReplicaId(f"r{i}"): depth for i, depth in enumerate(depths)}
    for replica in held:
        index.join(replica, NS, 4 * BLOCKS)
    await asyncio.sleep(0.5)
    for replica, depth in held.items():
        index.record(replica, PrefixChain(chain[: 8 * depth]))
        while index.is_feeding:  # noqa: ASYNC110 - nothing tells, and a benchmark may poll
            await asyncio.sleep(0.05)
        await asyncio.sleep(0.02)
    deepest = max(held, key=lambda replica: held[replica])
    while (await index.match(NS, [chain])).holdings[0].get(deepest) != held[deepest]:  # noqa: ASYNC110 - the same
        await asyncio.sleep(0.05)
    return held


async def timed(call: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
    """Return the seconds of wall and of CPU that one call took."""
    cpu, wall = time.process_time(), time.perf_counter()
    await call()
    return time.perf_counter() - wall, time.process_time() - cpu


async def lookups(name: str, depths: list[int], rounds: int, rng: random.Random) -> list[Figure]:
    async with served() as (index, wire):
        chain = PrefixChain(rng.randbytes(8 * BLOCKS))
        held = await hold(index, chain, depths)

        async def lookup() -> None:
            assert (await index.match(NS, [chain])).source == "index"

        async def ping() -> None:
            await wire.command("PING")

        pairs = [(await timed(lookup), await timed(ping)) for _ in range(rounds)][rounds // 10 :]
        before = await info(wire, "cpu")
        for _ in range(rounds):
            await lookup()
        after = await info(wire, "cpu")
        (found,) = (await index.match(NS, [chain])).holdings
    lost = [held[replica] - found.get(replica, 0) for replica in held]
    assert min(lost) >= 0, "more than is held"
    wall = [statistics.median(pair[i][0] for pair in pairs) for i in (0, 1)]
    cpu = [statistics.quantiles((pair[i][1] for pair in pairs), n=4)[0] for i in (0, 1)]
    server_s = sum(after[key] - before[key] for key in ("used_cpu_user", "used_cpu_sys")) / rounds
    return [
        Figure(f"{name}_lookup_over_ping", wall[0] / wall[1], "x", at_most=10),
        Figure(f"{name}_probes", index.probes, "probes", at_most=200),
        Figure(f"{name}_client_cpu_over_ping", 1e6 * (cpu[0] - cpu[1]), "us", at_most=60),
        Figure(f"{name}_lookup", 1e6 * wall[0], "us"),
        Figure(f"{name}_ping", 1e6 * wall[1], "us"),
        Figure(f"{name}_redis_cpu", 1e6 * server_s, "us"),
        Figure(f"{name}_replicas_exact", sum(not n for n in lost), "replicas"),
        Figure(f"{name}_most_blocks_too_low", max(lost), "blocks", at_most=BLOCKS / 64),
    ]


async def memory(blocks: int, rng: random.Random) -> Figure:
    async with served() as (index, wire):
        for i in range(REPLICAS):
            index.join(ReplicaId(f"r{i}"), NS, 1 << 20)
        await asyncio.sleep(0.5)
        before = (await info(wire, "memory"))["used_memory"]
        systems = [rng.randbytes(8 * rng.randrange(20, 200)) for _ in range(8)]
        total = sum(len(system) // 8 for system in systems)
        while total < blocks:
            own = rng.randrange(30, 400)
            chain = PrefixChain(rng.choice(systems) + rng.randbytes(8 * own))
            for replica in rng.sample(range(REPLICAS), rng.choice((1, 1, 2))):
                index.record(ReplicaId(f"r{replica}"), chain)
            total += own
            await asyncio.sleep(0.002)
        await asyncio.sleep(1.0)
        assert not index.stats.writes_dropped
        for log in range(REPLICAS):  # what is kept for the owners until the next snapshot is no entry
            await wire.command("DEL", f"{{kvr:v1:bench:{NS}:0}}s{log}")
        used = (await info(wire, "memory"))["used_memory"]
    return Figure("bytes_per_block", (used - before) / total, "B")


async def main(quick: bool) -> int:
    rng = random.Random(7)
    rounds, blocks = (200, 50_000) if quick else (2_000, 300_000)
    shared = [rng.randrange(1, BLOCKS + 1) for _ in range(16)]
    distinct = rng.sample(range(1, BLOCKS + 1), REPLICAS)
    figures = [
        *await lookups("shared_depths", [rng.choice(shared) for _ in range(REPLICAS)], rounds, rng),
        *await lookups("distinct_depths", distinct, rounds, rng),
        await memory(blocks, rng),
    ]
    return conclude(figures)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="fewer rounds and blocks")
    sys.exit(uvloop.run(main(parser.parse_args().quick)))
