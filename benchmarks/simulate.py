"""What the simulator says beside what is published or was computed otherwise, and how fast it is.

    python benchmarks/simulate.py [--quick]

  published    llm-d's shared-prefix benchmark: 8 replicas of Qwen3-32B on two H100 each, 16,334 requests. Bars are on
               what any engine model must show (who collapses and who does not); published figures stand beside ours
  hit shares   eight LRU caches on Mooncake's conversation hour, against a plain replay of its block ids
  speed        100,000 requests of 350 output tokens on 64 replicas, in blocks of 512, on one core
  determinism  the same seed twice, and skipped decode steps against single ones

`--quick` plays a quarter of the published fleet for a short while, three of the shares, and a tenth of the speed run.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from report import Figure, conclude

from kvroute.adapters.trace_files import Spool, lines_of
from kvroute.sim.engine import RooflineTime, default_time
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_figures import Outcomes
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload_plan import Pace, of_profile, of_trace
from kvroute.sim.workload_trace import Naming, Trace
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset

PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--quick", action="store_true", help="a part of each")
QUICK = PARSER.parse_args().quick if __name__ == "__main__" else False
TRACE = Path(__file__).resolve().parents[1] / "tests" / "data" / "mooncake_conversation_a.jsonl.gz"
OUTPUT = 242  # tokens: 8,730 published tokens a second x 452 s of stages / 16,334 requests
PUBLISHED = {  # policy: output tokens a second, mean and p90 of the time to first token (llm-d, "KV-cache wins")
    "blend": (8730, 0.298, 0.542),
    "least-request": (4300, 47.0, 94.9),
    "random": (4429, 45.3, 92.6),
}
SEEING, BLIND = ("kvroute", "blend", "sticky", "lmetric"), ("random", "least-request")
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
    """Play the published benchmark under each policy."""
    replicas, figures, warm_s = 8, {"output": str(OUTPUT)}, 50.0
    if QUICK:
        replicas, figures = 2, {**figures, "groups": "38", "stages": "4x50,8x20,12x20,15x20"}
    engine = EngineSettings(
        kv_tokens=307_328,
        block_size=64,
        time=RooflineTime(preset("qwen3-32b"), gpu("h100"), parallel=Parallel(tp=2)),
    )
    found: dict[str, Outcomes] = {}
    for policy in (*SEEING, *BLIND):
        work = of_profile("shared-prefix", figures, 64, Pace(), 1)
        one = Simulation(work, replicas, engine, RouterSettings(policy=policy), seed=1, warmup_s=warm_s).run()
        found[policy] = one
        said = PUBLISHED.get(policy)
        beside = "" if said is None or QUICK else f"   published {said[0]:,} tok/s, {said[1]:g} s, p90 {said[2]:g} s"
        print(
            f"  {policy:<14} {one.output_tokens_s:7,.0f} tok/s, first token {one.ttft.mean:8.3f} s, "
            f"p90 {one.ttft.p90:8.3f} s, hits {one.hit_share:.3f}, {one.preemptions:,} preemptions{beside}",
            flush=True,
        )
    seeing, blind = [found[name] for name in SEEING], [found[name] for name in BLIND]
    late = min(one.ttft.p90 for one in blind) / max(one.ttft.p90 for one in seeing)
    rate = min(one.output_tokens_s for one in seeing) / max(one.output_tokens_s for one in blind)
    yield Figure("published_p90_blind_over_seeing", late, "x", at_least=10.0)
    yield Figure("published_tokens_s_seeing_over_blind", rate, "x", at_least=1.5)


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
