"""What the simulator says beside what is published or was computed otherwise, and how fast it is.

    python benchmarks/simulate.py [--quick]

  published    llm-d's shared-prefix benchmark: 8 replicas of Qwen3-32B on two H100 each, 16 stages of 3 to 60 requests
               a second after a warm-up, as their load generator plays them. Bars: what any engine model must show
               (who collapses and who does not, and in which order); published figures stand beside ours
  hit shares   eight LRU caches on Mooncake's conversation hour, against a plain replay of its block ids
  speed        100,000 requests of 350 output tokens on 64 replicas, in blocks of 512, on one core
  determinism  the same seed twice, and skipped decode steps against single ones

`--quick` plays a quarter of the published fleet in a few stages, three of the shares, and a tenth of the speed run.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean

from msgspec import Struct, structs
from report import Figure, conclude

from kvroute.adapters.trace_files import Spool, lines_of
from kvroute.sim.engine import RooflineTime, default_time
from kvroute.sim.presets import limits_of
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_figures import Outcomes, Stage
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings, View
from kvroute.sim.workload_plan import Pace, of_profile, of_trace
from kvroute.sim.workload_trace import Naming, Trace
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--quick", action="store_true", help="a part of each")
QUICK = PARSER.parse_args().quick if __name__ == "__main__" else False
TRACE = Path(__file__).resolve().parents[1] / "tests" / "data" / "mooncake_conversation_a.jsonl.gz"
AT_ONCE = 640  # requests that the published clients had open: tokens/s x seconds a token, + those that waited (docs)
PUBLISHED: dict[
    tuple[str, View], tuple[int, float, float]
] = {  # rule, its knowledge: tokens/s, mean and p90 of the first token; means over the stages, as published
    ("blend:3:2:2", "exact"): (8730, 0.298, 0.542),
    ("blend:1:1:1", "original"): (6944, 13.316, 31.083),
    ("random", "exact"): (4429, 45.281, 92.551),
    ("blend:0:1:1", "original"): (4266, 46.987, 94.865),
}
PRECISE, APPROXIMATE, RANDOM, LOAD = PUBLISHED
OTHERS: tuple[tuple[str, View], ...] = (
    ("kvroute", "exact"),
    ("sticky", "exact"),
    ("lmetric", "exact"),
    ("least-request", "exact"),
)
SHARES = (  # policy, caches, tokens of each, hit share of a plain replay
    ("round-robin", 1, 8_000_000, 0.255),
    ("round-robin", 8, 1_000_000, 0.080),
    ("consistent-hash", 8, 1_000_000, 0.254),
    ("lmetric", 8, 1_000_000, 0.052),
    ("round-robin", 8, 80_000_000, 0.123),
    ("consistent-hash", 8, 80_000_000, 0.346),
)
SPEED_REQUESTS = 10_000 if QUICK else 100_000
SPEED_CPU_US_MAX = 180 / 100_000 * 1e6


def published() -> Iterator[Figure]:
    """Play the published benchmark under each rule, and compare."""
    replicas, figures, at_once = 8, {}, AT_ONCE
    if QUICK:
        replicas, figures, at_once = 2, {"groups": "38", "stages": "4x48,1x20,6x40,12x40,15x40"}, AT_ONCE // 4
    engine = EngineSettings(
        kv_tokens=307_328,
        block_size=64,
        time=RooflineTime(preset("qwen3-32b"), gpu("h100"), parallel=Parallel(tp=2)),
        limits=structs.replace(limits_of(gpu("h100")), async_scheduling=False),  # as vLLM was then
    )
    found: dict[tuple[str, View], Mean] = {}
    for rule in (*PUBLISHED, *OTHERS):
        work = of_profile("shared-prefix", figures, 64, Pace(), 1)
        routers = RouterSettings(policy=rule[0], knowledge=rule[1], metrics_every_s=0.05)
        one = Simulation(work, replicas, engine, routers, seed=1, at_once=at_once).run()
        found[rule] = mean = Mean.of(one.stages[1:])
        said = PUBLISHED.get(rule)
        beside = "" if said is None or QUICK else f"   published {said[0]:,} tok/s, {said[1]:g} s, p90 {said[2]:g} s"
        held = f", {one.held.count:,} held for {one.held.mean:.1f} s" if one.held.count else ""
        print(
            f"  {rule[0]:<13} {rule[1]:<8} {mean.tokens_s:6,.0f} tok/s, first token {mean.ttft_s:6.2f} s, "
            f"p90 {mean.ttft_p90_s:6.2f} s, hits {one.hit_share:.3f}, {one.preemptions:,} preemptions{held}{beside}",
            flush=True,
        )
    blind = (RANDOM, LOAD)
    yield Figure(
        "published_first_token_blind_over_precise",
        min(found[rule].ttft_p90_s for rule in blind) / found[PRECISE].ttft_p90_s,
        "x",
        at_least=10.0,
    )
    rates = [found[rule].tokens_s for rule in (PRECISE, APPROXIMATE)]
    yield Figure("published_tokens_s_precise_over_approximate", rates[0] / rates[1], "x", at_least=1.05)
    yield Figure(
        "published_tokens_s_approximate_over_blind",
        rates[1] / max(found[rule].tokens_s for rule in blind),
        "x",
        at_least=1.2,
    )
    yield Figure("published_tokens_s_random_over_load", found[RANDOM].tokens_s / found[LOAD].tokens_s, "x")


class Mean(Struct, frozen=True):
    """Means over stages, each weighing the same: so the publication sums up."""

    tokens_s: float
    ttft_s: float
    ttft_p90_s: float

    @classmethod
    def of(cls, stages: Sequence[Stage]) -> Mean:
        """Sum up some stages."""
        return cls(
            fmean(stage.output_tokens_s for stage in stages),
            fmean(stage.ttft.mean for stage in stages),
            fmean(stage.ttft.p90 for stage in stages),
        )


def shares() -> Iterator[Figure]:
    """Play requests one at a time, and compare hit shares."""
    engine_time = default_time()
    with Spool(lines_of(TRACE)) as spool:
        for policy, caches, kv_tokens, share in SHARES[:3] if QUICK else SHARES:
            work = of_trace(Trace(spool, Naming(512, 512)), Pace(loop="alone"), 1, has_times=True)
            engine = EngineSettings(kv_tokens=kv_tokens, block_size=512, time=engine_time)
            routers = RouterSettings(policy=policy, metrics_every_s=1e5)
            hits = Simulation(work, caches, engine, routers).run().hit_share
            print(
                f"  {policy:<16} {caches} x {kv_tokens:>10,} tokens: {hits:.4f}, plain replay {share:.3f}", flush=True
            )
            yield Figure(
                f"hit_share_differs_{policy}_{caches}x{kv_tokens // 10**6}M", abs(hits - share), "", at_most=0.01
            )


def speed() -> Iterator[Figure]:
    """Play many requests on many replicas."""
    figures = {"output": "350", "groups": "2000", "fresh": "1", "stages": "150x100000"}
    work = of_profile("shared-prefix", figures, 512, Pace(limit=SPEED_REQUESTS), 1)
    engine = EngineSettings(kv_tokens=396_272, block_size=512, time=default_time())
    start = time.process_time()
    one = Simulation(work, 64, engine, RouterSettings(), seed=1).run()
    spent_s = time.process_time() - start
    yield Figure("speed_completed_share", one.completed / SPEED_REQUESTS, "", at_least=1.0)
    yield Figure("speed_cpu_us_a_request", spent_s / SPEED_REQUESTS * 1e6, "us", at_most=SPEED_CPU_US_MAX)
    yield Figure("speed_cpu_s_100_000_requests", spent_s / SPEED_REQUESTS * 100_000, "s", at_most=180.0)
    yield Figure("speed_memory_most", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "MB", at_most=500.0)


def determinism() -> Iterator[Figure]:
    """Play a small fleet twice, and once step by step."""

    def run(skips: bool) -> Outcomes:
        work = of_profile("agent", {"sessions": "10", "rate": "2", "turns": "8", "tools": "3000"}, 16, Pace(), 3)
        engine = EngineSettings(kv_tokens=20_000, block_size=16, time=default_time())
        return Simulation(work, 3, engine, RouterSettings(count=2), seed=5, skips=skips).run()

    first = run(True)
    yield Figure("determinism_runs_that_differ", float(first != run(True)), "", at_most=0.0)
    yield Figure("determinism_skipping_differs", float(first != run(False)), "", at_most=0.0)


def main() -> int:
    return conclude([figure for part in (speed, determinism, shares, published) for figure in part()])


if __name__ == "__main__":
    sys.exit(main())
