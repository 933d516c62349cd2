"""What kvroute's routing serves beside the published rules, each point against its bars, in `kvroute simulate`.

    python benchmarks/routing.py [--quick] [--points 1,2] [--seeds 5] [--traces FOLDER] [--say]

  1  where nothing thrashes: first tokens with the objective there, whole answers with it there
  2  agents that thrash: more live conversations than the caches hold, with pauses of several lengths
  3  llm-d's shared prefixes with fresh questions, at half, full and double rate
  4  long pauses, and a day that rises into thrashing and falls again: every phase beside the best rule for it
  5  several routers beside one, with promises that are late or lost; and what they lose who share nothing
  6  one long prompt, 64 times at once
  9  a tenant with a tenth of the load beside one with the rest, against what it has alone

Every run is a command, which is printed before its figures; baselines know exactly what every cache holds, and the best
of them is taken figure by figure. Traces are looked for in FOLDER, else in $KVROUTE_TRACES, else among the tests' data;
where one is not there, a generator with its proportions takes its place, and the name of the figure says so.

`--quick` plays a part of points 1 to 3 with one seed. `--say` prints the commands and plays nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from report import Figure, conclude

HERE = Path(__file__).resolve().parents[1]
PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
PARSER.add_argument("--quick", action="store_true", help="a part of points 1 to 3, one seed")
PARSER.add_argument("--points", default="", help="which, comma-separated")
PARSER.add_argument("--seeds", type=int, default=0, help="runs of each policy")
PARSER.add_argument("--traces", type=Path, help="where trace files are")
PARSER.add_argument("--say", action="store_true", help="print the commands only")

KVROUTE = "kvroute"
SEEING = ("consistent-hash", "cache-threshold", "linear", "blend", "sticky", "lmetric", "affinity")
BLIND = ("round-robin", "least-request", "power-of-two")
CAPS = ("affinity:12", "affinity:16", "affinity:20", "affinity:24")
QUICK_RULES = ("cache-threshold", "sticky", "lmetric")
UNBOUNDED = ("--hold", "1000000", "--holds", "0")
BIG = tuple("--model qwen3-32b --hardware 2xh100 --kv-tokens 300000 --block-size 64 --max-model-len 131072".split())
SHARED = tuple("--model qwen3-32b --hardware 2xh100 --kv-tokens 307328 --block-size 64".split())
SMALL = tuple("--model llama-3.1-8b --hardware h100 --kv-tokens 396272".split())
SMALL_POOL = tuple("--model llama-3.1-8b --hardware h100 --kv-tokens 150000 --block-size 64 --replicas 2".split())
RATES = ("0.5", "1", "2")
SWE = "swe_gemini3_a"
STAND_INS = {  # trace: the generator that takes its place
    SWE: "agent:turns=36,tools=2000,repository=2000,task=1500,output=250,result=550,think=0,context=64000",
    "cc_sessions_a": (
        "agent:turns=40,tools=14000,repository=6000,task=8000,output=430,result=1800,think=20,context=120000"
    ),
    "azure2023_code": "chat:turns=1,system=1,profile=1,question=2047,output=28,sessions=8819",
}
SMALL_AGENTS = (
    "agent:rate=5,sessions=80,turns=20,tools=1000,repository=500,task=1500,output=200,result=1000,think=0,context=24000"
)
ROUTED = "agent:turns=24,tools=2000,repository=2000,task=1500,output=250,result=550,think=0"
ROUTED_SESSIONS = 12  # a replica
DAY = (
    "day:low=0.1,high=0.7,span=1200,agent.turns=24,agent.tools=2000,agent.repository=2000,agent.output=250,"
    "agent.result=550,agent.think=4"
)
PHASES = "300,500,700,900"
TENTH = ("--tenants", "9,1")
TENANTS_CASES = (  # name, workload, flags
    ("agents", SMALL_AGENTS.replace("sessions=80", "sessions=160"), SMALL_POOL),
    (
        "single_prompts",  # of which 1.5 times as many come as can be computed
        "chat:turns=1,system=1,profile=1,question=2000,output=100,rate=150,sessions=6000",
        (*SMALL, *"--block-size 64 --replicas 8".split()),
    ),
    (
        "shared_prefix",  # more than the caches hold at a time
        "shared-prefix:groups=38,fresh=1,drained=0,stages=11x200,output=300,spread=0.9",
        (*SHARED, "--replicas", "2"),
    ),
)
BURST, BURST_TOKENS = 64, 8000
BUSY_PER_S = 30.0  # prompts of 4,000 tokens, answers of 200: 70 % of what eight replicas can serve

Summary = dict[str, float]


@dataclass(frozen=True)
class Options:
    """What was asked for."""

    is_quick: bool
    seeds: int
    traces: tuple[Path, ...]
    only_says: bool

    def path(self, trace: str) -> Path | None:
        """Return where a trace is, None where it is nowhere."""
        paths = (folder / f"{trace}.jsonl.gz" for folder in self.traces)
        return next((path for path in paths if path.is_file()), None)


@dataclass(frozen=True)
class Case:
    """One workload on one fleet."""

    name: str
    workload: str  # a trace's name without its ending, a file, or a generator
    flags: tuple[str, ...]
    of_trace: tuple[str, ...] = ()  # flags that only the trace takes
    of_stand_in: str = ""  # figures of the generator that takes its place

    def command(self, options: Options, policy: str, extra: tuple[str, ...] = ()) -> tuple[str, ...]:
        """Return what plays it under one policy."""
        path = options.path(self.workload)
        work, special = (str(path), self.of_trace) if path else (self.workload, ())
        if path is None and self.workload in STAND_INS:
            work = f"{STAND_INS[self.workload]},{self.of_stand_in}".removesuffix(",")
        return (work, *self.flags, *special, "--policy", policy, *extra, "--seeds", str(options.seeds))

    def title(self, options: Options) -> str:
        """Return its name, with a word where a generator stands in for a trace."""
        stands_in = self.workload in STAND_INS and options.path(self.workload) is None
        return f"{self.name}_generated" if stands_in else self.name


CLAUDE = Case(
    "claude_code", "cc_sessions_a", BIG,
    tuple("--starts 0.5 --max-prompt 120000 --sessions 60".split()), "rate=0.5,sessions=60",
)  # fmt: skip


class Play:
    """Plays cases, and remembers what came of them."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._known: dict[tuple[str, ...], dict[str, Any]] = {}

    def whole(self, case: Case, policy: str, *extra: str) -> dict[str, Any]:
        """Return all that is said of one policy. Caps on live conversations hold without a bound."""
        extra = UNBOUNDED if policy.startswith("affinity:") else extra
        arguments = case.command(self.options, policy, extra)
        if arguments not in self._known:
            print(f"$ kvroute simulate {shlex.join(arguments)}", flush=True)
            if self.options.only_says:
                self._known[arguments] = {
                    "summary": {key: {"mean": 1.0} for key in SHOWN},
                    "phases": [],
                    "tenants": {"2": {"ttft_p90_s": 1.0}},
                }
                return self._known[arguments]
            command = [sys.executable, "-m", "kvroute", "simulate", *arguments, "--json"]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=HERE)
            ((_, self._known[arguments]),) = json.loads(done.stdout)["policies"].items()
            one = means(self._known[arguments])
            print(
                "    " + ", ".join(f"{label} {one[key]:,.3g}" for key, label in SHOWN.items() if one[key]), flush=True
            )
        return self._known[arguments]

    def run(self, case: Case, policy: str, *extra: str) -> Summary:
        """Return the means over seeds."""
        return means(self.whole(case, policy, *extra))

    def best(self, case: Case, policies: Iterable[str], key: str, *, most: bool = False) -> float:
        """Return the best mean of any baseline."""
        return (max if most else min)(self.run(case, policy)[key] for policy in policies)

    def title(self, case: Case) -> str:
        """Return a case's name."""
        return case.title(self.options)


SHOWN = {  # figures of a run that are printed below its command
    "output_tokens_s": "tokens/s", "hit_share": "hits", "preemptions": "preemptions", "ttft_mean_s": "first token mean",
    "ttft_p50_s": "p50", "ttft_p90_s": "p90", "ttft_p99_s": "p99", "end_to_end_mean_s": "end to end",
    "conversation_mean_s": "run mean", "conversation_p90_s": "p90", "conversation_most_s": "slowest",
    "held_share": "held", "held_mean_s": "for", "held_most_s": "longest", "failed": "failed",
    "conversations_lost": "runs lost",
}  # fmt: skip


def means(found: dict[str, Any]) -> Summary:
    """Return the means over seeds."""
    return {key: figure["mean"] for key, figure in found["summary"].items()}


def calm(play: Play) -> Iterator[Figure]:
    """Where nothing thrashes, nobody is better."""
    cases = [
        Case("mooncake", "mooncake_conversation_a", (*SMALL, *"--replicas 8 --block-size 512".split()), ("--rate", "2"))
    ]
    if play.options.is_quick:
        cases[0] = replace(cases[0], flags=(*cases[0].flags, "--limit", "1500"))
    else:
        cases += [
            Case(
                "swe_0.4",
                SWE,
                BIG,
                ("--starts", "0.4", "--think", "none", "--sessions", "150"),
                "rate=0.4,sessions=150",
            ),
            replace(CLAUDE, name="claude_code"),
            Case("azure", "azure2023_code", (*SMALL, "--block-size", "64"), ("--rate", "2"), "rate=5"),
        ]
    for case in cases:
        rules = QUICK_RULES if play.options.is_quick else (*SEEING, *BLIND)
        first = play.run(case, KVROUTE, "--ttft-weight", "1")["ttft_mean_s"]
        last = play.run(case, KVROUTE, "--ttft-weight", "0")["end_to_end_mean_s"]
        title = play.title(case)
        yield ratio(f"1_{title}_first_token_mean", first, play.best(case, rules, "ttft_mean_s"), at_most=1.02)
        yield ratio(f"1_{title}_end_to_end_mean", last, play.best(case, rules, "end_to_end_mean_s"), at_most=1.01)
        if case.name == "mooncake":
            other = play.run(case, "lmetric")["end_to_end_mean_s"]
            yield ratio(f"1_{title}_end_to_end_over_lmetric", last, other, at_most=0.96)


def thrashing(play: Play) -> Iterator[Figure]:
    """Agents that pause for nothing but their own answers, and agents that do pause."""
    if play.options.is_quick:
        yield from thrashed(play, Case("agents", SMALL_AGENTS, SMALL_POOL), 1.5, (*QUICK_RULES, "affinity:8"))
        return
    rules = (*SEEING, *CAPS)
    for starts, least in (("0.5", 1.35), ("0.65", 1.5), ("0.8", 1.5), ("1.0", 1.5)):
        flags = ("--starts", starts, "--think", "none")
        yield from thrashed(play, Case(f"swe_{starts}", SWE, BIG, flags, f"rate={starts},sessions=253"), least, rules)
    for think in ("4", "10", "30"):
        flags, stand_in = ("--starts", "0.65", "--think", f"exp:{think}"), f"rate=0.65,sessions=253,think={think}"
        case = Case(f"swe_pause_{think}s", SWE, BIG, flags, stand_in)
        one, title = play.run(case, KVROUTE, *UNBOUNDED), play.title(case)
        best = play.best(case, rules, "output_tokens_s", most=True)
        yield ratio(f"2_{title}_tokens_s", one["output_tokens_s"], best, at_least=1.0)
        yield ratio(
            f"2_{title}_first_token_mean", one["ttft_mean_s"], play.best(case, rules, "ttft_mean_s"), at_most=1.1
        )


def thrashed(play: Play, case: Case, least: float, rules: Sequence[str]) -> Iterator[Figure]:
    """Yield what is asked where caches are too small for all that live.

    Bars are on the best rule, a cap on live conversations that is right for this very traffic included; figures without
    such caps stand beside them.
    """
    one, title = play.run(case, KVROUTE, *UNBOUNDED), play.title(case)
    bounded = play.run(case, KVROUTE)
    published_rules = [rule for rule in rules if ":" not in rule]
    for name, key, bar in (
        ("run_mean", "conversation_mean_s", 0.5),
        ("run_p90", "conversation_p90_s", 1.0),
        ("run_slowest", "conversation_most_s", 1.0),
        ("first_token_p50", "ttft_p50_s", 0.25),
        ("first_token_p90", "ttft_p90_s", 0.25),
        ("first_token_mean", "ttft_mean_s", 0.5),
    ):
        yield ratio(f"2_{title}_{name}", one[key], play.best(case, rules, key), at_most=bar)
        yield ratio(f"2_{title}_{name}_without_caps", one[key], play.best(case, published_rules, key))
    best = play.best(case, rules, "output_tokens_s", most=True)
    published = play.best(case, published_rules, "output_tokens_s", most=True)
    preempted = play.best(case, published_rules, "preemptions")
    yield ratio(f"2_{title}_tokens_s", one["output_tokens_s"], best, at_least=least)
    yield ratio(f"2_{title}_tokens_s_without_caps", one["output_tokens_s"], published)
    yield Figure(f"2_{title}_hits", one["hit_share"], "", at_least=0.9)
    yield ratio(f"2_{title}_preemptions", one["preemptions"], preempted, at_most=0.03)
    for words, run in (("no_bound", one), ("default_bound", bounded)):
        yield Figure(f"2_{title}_first_token_p99_{words}", run["ttft_p99_s"], "s")
        yield Figure(f"2_{title}_longest_hold_{words}", run["held_most_s"], "s")
        yield Figure(f"2_{title}_runs_refused_{words}", run["conversations_lost"], "")


def prefixes(play: Play) -> Iterator[Figure]:
    """Prompts that share long prefixes, more than the fleet can serve."""
    stages = "shared-prefix:groups=150,fresh=1,drained=0"
    cases = [Case(f"shared_prefix_x{rate}", stages, (*SHARED, "--replicas", "8", "--rate", rate)) for rate in RATES]
    rules: Sequence[str] = SEEING
    if play.options.is_quick:
        short = "shared-prefix:groups=38,fresh=1,stages=12x60"
        cases, rules = [Case("shared_prefix", short, (*SHARED, "--replicas", "2"))], QUICK_RULES
    for case in cases:
        one = play.run(case, KVROUTE, *UNBOUNDED)
        yield Figure(f"3_{case.name}_preemptions", one["preemptions"], "", at_most=0)
        best = play.best(case, rules, "output_tokens_s", most=True)
        yield ratio(f"3_{case.name}_tokens_s", one["output_tokens_s"], best, at_least=1.02)
        best = play.best(case, rules, "end_to_end_mean_s")
        yield ratio(f"3_{case.name}_end_to_end_mean", one["end_to_end_mean_s"], best, at_most=0.98)
        yield ratio(f"3_{case.name}_first_token_p50", one["ttft_p50_s"], play.best(case, rules, "ttft_p50_s"))


def phases(play: Play) -> Iterator[Figure]:
    """Load for which holding is wrong, and load that needs it for a while."""
    rules = (*SEEING, *CAPS)
    one, title = play.run(CLAUDE, KVROUTE, *UNBOUNDED), play.title(CLAUDE)
    for name, key in (("first_token_mean", "ttft_mean_s"), ("end_to_end_mean", "end_to_end_mean_s")):
        yield ratio(f"4_{title}_{name}", one[key], play.best(CLAUDE, rules, key), at_most=1.02)
    day = Case("day", DAY, (*BIG, "--phases", PHASES))
    ours = play.whole(day, KVROUTE, *UNBOUNDED)["phases"]
    theirs = [play.whole(day, rule)["phases"] for rule in rules]
    for at, phase in enumerate(ours):
        best = min(other[at]["end_to_end_mean_s"] for other in theirs)
        yield ratio(f"4_day_{phase['begin_s']:.0f}s_end_to_end_mean", phase["end_to_end_mean_s"], best, at_most=1.02)
        yield Figure(f"4_day_{phase['begin_s']:.0f}s_held", phase["held_share"], "")


def sharing(play: Play) -> Iterator[Figure]:
    """Routers that share beside one router, and beside routers that do not."""
    for replicas in (8, 64):
        work = f"{ROUTED},rate={0.16 * replicas:g},sessions={ROUTED_SESSIONS * replicas}"
        case = Case(f"routers_{replicas}_replicas", work, (*BIG, "--replicas", str(replicas), *UNBOUNDED))
        one = play.run(case, KVROUTE)
        for count in (2, 4, 8):
            several = ("--routers", str(count), "--ledger-lag", "0.005", "--ledger-loss", "0.01")
            shared = play.run(case, KVROUTE, *several)
            private = play.run(case, KVROUTE, "--routers", str(count), "--private", "--knowledge", "sent")
            for name, key in (("hits", "hit_share"), ("tokens_s", "output_tokens_s")):
                yield ratio(f"5_{replicas}_replicas_{count}_routers_{name}", shared[key], one[key], at_least=0.98)
                yield ratio(f"5_{replicas}_replicas_{count}_private_{name}", private[key], one[key])


def burst(play: Play) -> Iterator[Figure]:
    """One prompt, many times at once."""
    with tempfile.TemporaryDirectory() as folder:
        idle = Path(folder, "burst.jsonl")
        idle.write_text("".join(f"{burst_row(0)}\n" for _ in range(BURST)))
        flags = (*SMALL, "--block-size", "16", "--jitter", "none", "--replicas")
        one = play.run(Case("burst", str(idle), (*flags, "8")), KVROUTE)
        splits = [play.run(Case("burst", str(idle), (*flags, str(split))), "round-robin") for split in (1, 2, 4, 8)]
        for name, key in (("first_token_mean", "ttft_mean_s"), ("end_to_end_mean", "end_to_end_mean_s")):
            yield ratio(f"6_burst_idle_{name}", one[key], min(split[key] for split in splits), at_most=1.05)
        busy = Path(folder, "busy.jsonl")
        busy.write_text("".join(f"{row}\n" for row in busy_rows()))
        found = play.run(Case("busy", str(busy), (*flags, "8")), KVROUTE)
        hits = found["hit_share"] * sum(json.loads(row)["input_length"] for row in busy_rows())
        computed = round(BURST - hits / (BURST_TOKENS - 16), 2)
        yield Figure("6_burst_busy_prefills_of_the_prefix", computed, "", at_most=2)


def tenants(play: Play) -> Iterator[Figure]:
    """A tenant that asks for little beside one that asks for more than there is."""
    cases = [Case(name, work, (*flags, *TENTH, *UNBOUNDED)) for name, work, flags in TENANTS_CASES]
    if not play.options.is_quick:
        starts = ("--starts", "0.65", "--think", "none")
        cases.append(Case("swe_0.65", SWE, (*BIG, *TENTH, *UNBOUNDED), starts, "rate=0.65,sessions=253"))
    for case in cases:
        beside = play.whole(case, KVROUTE)
        alone = play.whole(case, KVROUTE, "--only-tenant", "2")
        one, title = tenant_of(alone), play.title(case)
        yield ratio(f"9_{title}_first_token_p90", tenant_of(beside)["ttft_p90_s"], one["ttft_p90_s"], at_most=1.5)
        lmetric = play.whole(case, "lmetric")
        yield ratio(f"9_{title}_first_token_p90_under_lmetric", tenant_of(lmetric)["ttft_p90_s"], one["ttft_p90_s"])
        rates = [means(run)["output_tokens_s"] for run in (beside, lmetric)]
        yield ratio(f"9_{title}_tokens_s_over_lmetric", *rates)


def tenant_of(found: dict[str, Any]) -> Summary:
    """Return the figures of the one who asks for little."""
    of: Summary = found["tenants"]["2"]
    return of


def burst_row(at_ms: int) -> str:
    """Return one of the equal requests."""
    blocks = BURST_TOKENS // 16
    row = {"timestamp": at_ms, "input_length": BURST_TOKENS, "output_length": 100, "hash_runs": [[0, blocks]]}
    return json.dumps(row)


def busy_rows() -> Iterator[str]:
    """Yield single prompts that keep eight replicas busy for 70 % of the time, and the burst among them."""
    rng, at_ms, block, has_burst = Random(6), 0.0, 1 << 20, False
    while at_ms < 40_000:
        at_ms += rng.expovariate(BUSY_PER_S / 1000)
        if not has_burst and at_ms >= 20_000:
            yield from (burst_row(int(at_ms)) for _ in range(BURST))
            has_burst = True
        row = {"timestamp": int(at_ms), "input_length": 4000, "output_length": 200, "hash_runs": [[block, 250]]}
        block += 1000
        yield json.dumps(row)


def ratio(name: str, value: float, other: float, **bar: float) -> Figure:
    """Return one figure over another."""
    if not other:
        value, other = (1.0, 1.0) if not value else (value, 1.0)
    return Figure(name, value / other, "x", **bar)


POINTS = {"1": calm, "2": thrashing, "3": prefixes, "4": phases, "5": sharing, "6": burst, "9": tenants}


def main() -> int:
    given = PARSER.parse_args()
    folders = [given.traces, os.environ.get("KVROUTE_TRACES"), HERE / "tests" / "data"]
    traces = tuple(Path(folder).resolve() for folder in folders if folder)
    seeds = given.seeds or (1 if given.quick else 5)
    play = Play(Options(given.quick, seeds, traces, given.say))
    points = given.points.split(",") if given.points else list(POINTS)[: 3 if given.quick else None]
    figures = [figure for point in points for figure in POINTS[point](play)]
    return 0 if given.say else conclude(figures)


if __name__ == "__main__":
    sys.exit(main())
