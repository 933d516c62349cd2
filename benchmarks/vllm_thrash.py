"""Agents on real engines, more of them than the caches hold: what holding requests is worth where it is not simulated.

    python benchmarks/vllm_thrash.py [--quick] [--rounds N] [--seconds S] [--policy NAME ...]

Two vLLM engines on the CPU with small pools, and `kvroute serve` before them, started afresh for every policy with no
setting but its name. Each agent plays recorded coding runs one after the other, without a pause: a long first message,
then the engine's own answers and recorded tool output, every turn longer than the one before, until the run is over.
Recorded texts are cut to lengths that fit the engines. The first run of every agent is played and left out of the
figures. Policies take turns, round by round. With --seconds each round ends then, whoever is how far, and all turns
that were done count, first runs too: for machines on which a policy that thrashes takes too long.

    turns       completed turns a minute, from the first counted one to the last
    run         time of a whole run, holding included: mean and slowest
    first       time to the first token
    cached      share of the prompts' tokens that the engines took from their caches

It needs the engines that tests/vllm/setup.sh installs, two cores for themselves, and time: about 10 minutes a policy
and round, a third of that with --quick.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gzip
import json
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
from _rig import ROOT, Router, free_port, write_model
from msgspec import Struct, structs
from report import Figure, conclude
from tokenizers import Tokenizer

from tests.vllm.engines import BLOCK_SIZE, SERVED_NAME, Engines

OURS = "kvroute"
POLICIES = (OURS, "round-robin", "least-request", "lmetric")
RUNS = ROOT / "tests" / "data" / "swe_text_a.jsonl.gz"
SHAPE = {"num_hidden_layers": 6, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8}
FIRST_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 1450, 184, 48  # of the first message, of each later one, of each answer
TURNS_MIN, RUN_MAX, SLOWEST_MAX = 1.6, 0.5, 1.0  # times the best other policy's
PREEMPTIONS = "vllm:num_preemptions_total"
PATIENCE_S = 1200.0


class Scale(Struct, frozen=True):
    """How much is played."""

    agents: int
    pool_tokens: int  # of each engine
    turns: int  # a run
    runs: int  # an agent, the first one not counted
    rounds: int
    seconds: float | None = None  # after which a round ends; None = when all runs have ended


# A run's prompts grow from 1,450 to some 3,400 tokens (most recorded tool output is shorter than TURN_TOKENS): at their
# longest these conversations are 1.8 times what the two pools hold.
FULL = Scale(agents=34, pool_tokens=32_000, turns=14, runs=3, rounds=3)
QUICK = Scale(agents=17, pool_tokens=16_000, turns=14, runs=2, rounds=1)


class Turn(Struct, frozen=True):
    """One counted answer. Times are monotonic."""

    sent_s: float
    first_s: float
    done_s: float
    prompt_tokens: int
    cached_tokens: int


class Played(Struct):
    """What one policy's round came to."""

    turns: list[Turn] = []
    runs_s: list[float] = []
    preemptions: int = 0
    is_whole: bool = True  # every run has ended

    @property
    def turns_a_minute(self) -> float:
        first, last = min(turn.sent_s for turn in self.turns), max(turn.done_s for turn in self.turns)
        return 60 * len(self.turns) / (last - first)

    @property
    def cached(self) -> float:
        return sum(turn.cached_tokens for turn in self.turns) / sum(turn.prompt_tokens for turn in self.turns)

    @property
    def ttfts_s(self) -> list[float]:
        return [turn.first_s - turn.sent_s for turn in self.turns]


def scripts(tokenizer: Tokenizer, turns: int) -> list[list[str]]:
    """Return what the user says in each recorded run that is long enough: a first message, and one for each turn."""

    def cut(text: str, tokens: int) -> str:
        return str(tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids[:tokens]))

    with gzip.open(RUNS, "rt", encoding="utf-8") as lines:
        recorded = [json.loads(line)["messages"] for line in lines]
    found = []
    for messages in recorded:
        said = [message["content"] for message in messages if message["role"] != "assistant"]
        later = [cut(text, TURN_TOKENS) for text in said[2:]]
        if len(later) >= turns - 1:
            found.append([cut(f"{said[0]}\n{said[1]}", FIRST_TOKENS), *later[: turns - 1]])
    return found


class Agents:
    """Everybody who plays, and what is counted of it."""

    def __init__(self, session: aiohttp.ClientSession, texts: list[list[str]], scale: Scale) -> None:
        self.session, self.texts, self.scale = session, texts, scale
        self.played = Played()

    async def play(self) -> Played:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.scale.seconds), asyncio.TaskGroup() as group:
                for agent in range(self.scale.agents):
                    group.create_task(self.agent(agent))
        return self.played

    async def agent(self, agent: int) -> None:
        for run in range(self.scale.runs):
            number = agent + run * self.scale.agents
            start_s = time.monotonic()
            async for turn in self.run(number):
                if run or self.scale.seconds:
                    self.played.turns.append(turn)
            if run or self.scale.seconds:
                self.played.runs_s.append(time.monotonic() - start_s)

    async def run(self, number: int) -> AsyncIterator[Turn]:
        """Play one run; nobody else's begins like it."""
        first, *later = self.texts[number % len(self.texts)]
        messages = [{"role": "user", "content": f"Run {number} of many.\n{first}"}]
        for said in (*later, None):
            answer, turn = await self.ask(messages)
            yield turn
            if said is not None:
                messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": said}]

    async def ask(self, messages: list[dict[str, str]]) -> tuple[str, Turn]:
        body = {
            "model": SERVED_NAME, "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        sent_s, first_s, text = time.monotonic(), 0.0, ""
        usage: dict[str, Any] = {}
        async with self.session.post("/v1/chat/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"{answer.status}: {await answer.text()}")
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(str(event))
                for choice in event["choices"]:
                    if delta := choice["delta"].get("content"):
                        first_s = first_s or time.monotonic()
                        text += delta
                usage = event.get("usage") or usage
        done_s = time.monotonic()
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0
        return text, Turn(sent_s, first_s or done_s, done_s, usage["prompt_tokens"], cached)


def preemptions(engines: Engines) -> int:
    """Return how many sequences the engines have preempted since they started."""
    total = 0.0
    for url in engines.urls:
        with urllib.request.urlopen(f"{url}/metrics", timeout=10) as page:
            lines = page.read().decode().splitlines()
        total += sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(PREEMPTIONS))
    return int(total)


async def play(router: Router, texts: list[list[str]], scale: Scale) -> Played:
    timeout = aiohttp.ClientTimeout(total=PATIENCE_S)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(router.url, timeout=timeout, connector=connector) as session:
        return await Agents(session, texts, scale).play()


def larger_model(folder: Path) -> Path:
    """Return the tests' model with layers large enough that computing a prompt takes its time."""
    write_model(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | SHAPE))
    return folder


def rounds(folder: Path, policies: list[str], scale: Scale) -> dict[str, list[Played]]:
    model = larger_model(folder / "model")
    texts = scripts(Tokenizer.from_file(str(model / "tokenizer.json")), scale.turns)
    played: dict[str, list[Played]] = {policy: [] for policy in policies}
    blocks = str(scale.pool_tokens // BLOCK_SIZE)
    with Engines(model, folder / "engines") as engines:
        ports = [(free_port(), free_port(), free_port()) for _ in range(2)]
        # float32: without instructions for bfloat16 a core computes it at an eighth of the speed
        engines.start(ports, "--num-gpu-blocks-override", blocks, "--max-model-len", "8192", "--dtype", "float32")
        for number in range(scale.rounds):
            for policy in policies if number % 2 == 0 else policies[::-1]:
                engines.reset_caches()
                before = preemptions(engines)
                env = {"KVROUTE_ROUTING__POLICY": policy}
                with Router(*engines.urls, log=folder / f"{policy}{number}.log", env=env) as router:
                    result = asyncio.run(play(router, texts, scale))
                result.preemptions = preemptions(engines) - before
                result.is_whole = scale.seconds is None
                played[policy].append(result)
                print(f"# round {number + 1}, {policy}: {result.turns_a_minute:.1f} turns/min", file=sys.stderr)
    return played


def figures(played: dict[str, list[Played]]) -> Iterator[Figure]:
    """Yield every policy's figures, medians of its rounds, and ours beside the best other one."""
    is_whole = all(one.is_whole for results in played.values() for one in results)
    middle = {
        policy: {"turns": statistics.median(one.turns_a_minute for one in results)}
        | {
            name: statistics.median(of(one.runs_s) for one in results)
            for name, of in (("run", statistics.fmean), ("slowest", max))
            if is_whole
        }
        for policy, results in played.items()
    }
    for policy, results in played.items():
        name = policy.replace("-", "_")
        yield Figure(f"{name}_turns", middle[policy]["turns"], "/min")
        yield Figure(f"{name}_turns_done", statistics.median(len(one.turns) for one in results), "")
        if is_whole:
            yield Figure(f"{name}_run_mean", middle[policy]["run"], "s")
            yield Figure(f"{name}_run_slowest", middle[policy]["slowest"], "s")
        yield Figure(f"{name}_first_p50", statistics.median(s for one in results for s in one.ttfts_s), "s")
        yield Figure(f"{name}_first_mean", statistics.fmean(s for one in results for s in one.ttfts_s), "s")
        yield Figure(f"{name}_cached", statistics.median(one.cached for one in results), "")
        yield Figure(f"{name}_preemptions", statistics.median(one.preemptions for one in results), "")
    others = [figures for policy, figures in middle.items() if policy != OURS]
    if OURS not in middle or not others:
        return
    ours = middle[OURS]
    yield Figure("turns_over_best", ours["turns"] / max(o["turns"] for o in others), "x", at_least=TURNS_MIN)
    if not is_whole:
        return
    yield Figure("run_mean_over_best", ours["run"] / min(o["run"] for o in others), "x", at_most=RUN_MAX)
    yield Figure("run_slowest_over_best", ours["slowest"] / min(o["slowest"] for o in others), "x", at_most=SLOWEST_MAX)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="half the agents and pools, one round, one counted run")
    parser.add_argument("--rounds", type=int, help="how often each policy plays")
    parser.add_argument("--seconds", type=float, help="end every round then, and count all turns that were done")
    parser.add_argument("--policy", action="append", help=f"more than once: which; else {', '.join(POLICIES)}")
    args = parser.parse_args()
    scale = QUICK if args.quick else FULL
    scale = structs.replace(scale, rounds=args.rounds or scale.rounds, seconds=args.seconds)
    with tempfile.TemporaryDirectory(prefix="kvroute-bench-") as folder:
        return conclude(figures(rounds(Path(folder), args.policy or list(POLICIES), scale)))


if __name__ == "__main__":
    sys.exit(main())
