"""What the simulator says beside what is published or was computed otherwise, and how fast it is.

    python benchmarks/simulate.py [--quick] [--seeds N] [--only PART]

  published    llm-d's shared-prefix benchmark: 8 replicas of Qwen3-32B on two H100 each, 16 stages of 3 to 60 requests
               a second after a warm-up, as their load generator plays them. Bars: what any engine model must show
               (who collapses and who does not, and in which order); published figures stand beside ours. The published
               run is one of each rule: `--seeds` plays several, and says how far apart they are
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
from statistics import fmean, stdev

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
PARSER.add_argument("--seeds", type=int, default=1, metavar="N", help="runs of each rule of the published benchmark")
PARSER.add_argument("--only", choices=("speed", "determinism", "shares", "published"), help="one part")
OPTIONS = PARSER.parse_args(None if __name__ == "__main__" else [])
QUICK = OPTIONS.quick
TRACE = Path(__file__).resolve().parents[1] / "tests" / "data" / "mooncake_conversation_a.jsonl.gz"
AT_ONCE = 640  # requests that the published clients had open: 10 for each of 64 cores, as their throughput shows (docs)
PUBLISHED: dict[
    tuple[str, View], tuple[int, float, float]
] = {  # rule, its knowledge: tokens/s, mean and p90 of the first token; means over the stages, as published
    ("blend:3:2:2", "exact"): (8730, 0.298, 0.542),
    ("blend:1:1:1", "original"): (6944, 13.316, 31.083),
    ("random", "exact"): (4429, 45.281, 92.551),
    ("blend:0:1:1", "original"): (4266, 46.987, 94.865),
}
PRECISE, APPROXIMATE, RANDOM, LOAD = PUBLISHED
STAGES: dict[tuple[str, View], tuple[float, ...]] = {  # tokens/s of each stage, as published
    RANDOM: (1314.0, 3568.5, 3791.1, 4933.1, 4765.4, 4781.3, 4636.3, 4332.6, 4773.8, 4844.6, 4969.5, 4783.2, 4845.1,
             4921.7, 4764.2, 4835.2),
    LOAD: (1274.8, 3607.0, 3348.4, 4902.5, 4785.5, 4872.8, 4888.7, 4660.7, 4946.4, 4973.3, 4723.6, 4004.8, 3991.0,
           4671.9, 3866.5, 4745.1),
}  # fmt: skip
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
AS_IT_WAS = structs.replace(  # vLLM of September 2025: it did not schedule ahead, and admitted what a first chunk fits
    limits_of(gpu("h100")), async_scheduling=False, reserve_full_prompt=False
)
GAUGES_LATE_S = 1.0  # what load-only routing is sensitive to, and no publication states
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
        limits=AS_IT_WAS,
    )

    def play(rule: tuple[str, View], seed: int, gauges_late_s: float = 0.0) -> Outcomes:
        work = of_profile("shared-prefix", figures, 64, Pace(), seed)
        routers = RouterSettings(policy=rule[0], knowledge=rule[1], metrics_every_s=0.05, metrics_lag_s=gauges_late_s)
        return Simulation(work, replicas, engine, routers, seed=seed, at_once=at_once).run()

    runs: dict[tuple[str, View], list[Outcomes]] = {}
    for rule in (*PUBLISHED, *OTHERS):
        runs[rule] = [play(rule, seed) for seed in range(1, OPTIONS.seeds + 1)]
        print(f"  {told(rule, runs[rule])}", flush=True)
    found = {rule: Mean.over([Mean.of(one.stages[1:]) for one in each]) for rule, each in runs.items()}
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
    if not QUICK:
        yield from undecided(runs[RANDOM], runs[LOAD])
        late = [play(LOAD, seed, GAUGES_LATE_S) for seed in range(1, OPTIONS.seeds + 1)]
        print(f"  {told(LOAD, late)}, with gauges {GAUGES_LATE_S:g} s old", flush=True)
        rate = fmean(Mean.of(one.stages[1:]).tokens_s for one in late)
        ratio = found[RANDOM].tokens_s / rate
        yield Figure("published_tokens_s_random_over_load_old_gauges", ratio, "x")


def told(rule: tuple[str, View], runs: Sequence[Outcomes]) -> str:
    """Return a line about one rule: means over its runs, and of the tokens a second the extremes."""
    means = [Mean.of(one.stages[1:]) for one in runs]
    mean, rates = Mean.over(means), sorted(one.tokens_s for one in means)
    spread = f" ({rates[0]:,.0f} to {rates[-1]:,.0f})" if len(runs) > 1 else ""
    held = fmean(one.held.count for one in runs)
    waits = f", {held:,.0f} held for {fmean(one.held.mean for one in runs):.1f} s" if held else ""
    said = PUBLISHED.get(rule)
    beside = "" if said is None or QUICK else f"   published {said[0]:,} tok/s, {said[1]:g} s, p90 {said[2]:g} s"
    return (
        f"{rule[0]:<13} {rule[1]:<8} {mean.tokens_s:6,.0f} tok/s{spread}, first token {mean.ttft_s:6.2f} s, "
        f"p90 {mean.ttft_p90_s:6.2f} s, hits {fmean(one.hit_share for one in runs):.3f}, "
        f"{fmean(one.preemptions for one in runs):,.0f} preemptions{waits}{beside}"
    )


def undecided(random: Sequence[Outcomes], load: Sequence[Outcomes]) -> Iterator[Figure]:
    """Say how far load-only is from random routing, stage by stage, there and here: no bar, nothing decides it."""
    pairs = [
        (one.output_tokens_s, other.output_tokens_s)
        for run, beside in zip(random, load, strict=True)
        for one, other in zip(run.stages[1:], beside.stages[1:], strict=True)
    ]
    there = list(zip(STAGES[RANDOM], STAGES[LOAD], strict=True))
    for name, stages in (("as_published", there), ("here", pairs)):
        shares = [other / one - 1 for one, other in stages]
        yield Figure(f"load_over_random_stages_mean_{name}", fmean(shares), "")
        yield Figure(f"load_over_random_stages_error_{name}", stdev(shares) / len(shares) ** 0.5, "")
        yield Figure(f"load_over_random_stages_won_{name}", sum(share > 0 for share in shares) / len(shares), "")


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

    @classmethod
    def over(cls, means: Sequence[Mean]) -> Mean:
        """Return the mean of several runs."""
        return cls(*(fmean(each) for each in zip(*map(structs.astuple, means), strict=True)))


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
    parts = [part for part in (speed, determinism, shares, published) if OPTIONS.only in (None, part.__name__)]
    return conclude([figure for part in parts for figure in part()])


if __name__ == "__main__":
    sys.exit(main())
