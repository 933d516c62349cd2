"""The simulated engine against vLLM: its own scheduler in process, round by round, and a whole engine over HTTP."""

from __future__ import annotations

import json
import os
import random
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq

from kvroute.adapters.event_replay import ask
from kvroute.kv.pool import BlockPool
from kvroute.sim.replica import Limits, SimReplica
from tests.processes import free_port
from tests.vllm.engines import BLOCK_SIZE, SERVED_NAME, Engine, Engines, environment, venv
from tests.vllm.scripts import Translator, first_difference, request_of, script_of, simulate, written
from tests.vllm.scripts_of_clients import script_of_clients

pytestmark = pytest.mark.vllm
SCRIPTS = int(os.environ.get("KVROUTE_SCHEDULER_SCRIPTS", "300"))  # of each kind
FIRST_SEED = int(os.environ.get("KVROUTE_SCHEDULER_SEED", "0"))
PREEMPTIONS_LEAST = 100  # over all scripts: fewer would mean that the scripts try too little
EVENTS_LEAST = 5_000
POOL_BLOCKS = 40  # of the engine over HTTP
TOKEN_BYTES = 256  # of cache that the tiny model keeps
CONTEXT = 1024
BATCHED_TOKENS = 256
HTTP_REQUESTS = 200
VOCABULARY = range(300, 5000)  # tokens without a meaning of their own


@pytest.fixture(scope="module", params=[script_of, script_of_clients], ids=["chance", "clients"])
def compared(request):
    """The scripts of one kind, each with vLLM's trace of it."""
    scripts = [request.param(seed) for seed in range(FIRST_SEED, FIRST_SEED + SCRIPTS)]
    done = subprocess.run(
        [venv() / "bin" / "python", Path(__file__).with_name("scheduler_probe.py")],
        input="".join(json.dumps(script) + "\n" for script in scripts),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    traces = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(traces) == len(scripts)
    return list(zip(scripts, traces, strict=True))


def test_every_step_is_the_engines_own(compared):
    """Tokens scheduled, preemptions, hits, events, the queue of free blocks and counters agree in every step."""
    differences = [
        f"seed {FIRST_SEED + number}: {found}"
        for number, (script, trace) in enumerate(compared)
        if (found := first_difference(script, simulate(script), trace))
    ]
    assert differences == []


def test_the_scripts_try_what_matters(compared):
    """They preempt, evict, hit, abort, reset, and use both policies and both kinds of scheduling."""
    rounds = [each for _, trace in compared for each in trace]
    assert sum(len(each["preempted"]) for each in rounds) > PREEMPTIONS_LEAST
    assert sum(len(each["events"]) for each in rounds) > EVENTS_LEAST
    kinds = {event[0] for each in rounds for event in each["events"]}
    hits = sum(1 for each in rounds for cached in each["cached"].values() if cached)
    settings = {(script["settings"]["policy"], script["settings"]["async_scheduling"]) for script, _ in compared}
    assert (kinds, hits > 0, len(settings)) == ({"S", "R", "C"}, True, 4)


@pytest.fixture(scope="module")
def small_engine(run_dir: Path, model_dir: Path) -> Iterator[Engine]:
    """A whole engine with a cache of a few conversations."""
    flags = ("--kv-cache-memory-bytes", str(POOL_BLOCKS * BLOCK_SIZE * TOKEN_BYTES), "--max-model-len", str(CONTEXT))
    with Engines(model_dir, run_dir / "small") as engines:
        engines.start(
            [(free_port(), free_port(), free_port())], *flags, "--max-num-batched-tokens", str(BATCHED_TOKENS)
        )
        yield engines.engines[0]


def posted(url: str, body: dict[str, Any] | None = None) -> Any:
    request = urllib.request.Request(url, json.dumps(body or {}).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read() or b"null")


def completed(engine: Engine, prompt: list[int], tokens: int) -> tuple[list[int], int]:
    """Return the tokens of an answer, and how many of the prompt's were cached."""
    body = {"prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    answer = posted(f"{engine.url}/v1/completions", {"model": SERVED_NAME, **body})
    return answer["choices"][0]["token_ids"], (answer["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0


async def told(engine: Engine) -> list[list[Any]]:
    """All events of an engine since its start, as its replay socket keeps them, in the form of scheduler_probe."""
    found: list[list[Any]] = []

    def take(_: int, payload: bytes) -> bool:
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                hashes, parent, tokens = event["block_hashes"], event["parent_block_hash"], event["token_ids"]
                found.append(["S", hashes, parent, tokens, event["medium"]])
            else:
                found.append(["R", event["block_hashes"]] if event["type"] == "BlockRemoved" else ["C"])
        return True

    assert await ask(zmq.Context.instance(), f"tcp://127.0.0.1:{engine.replay_port}", 0, take)
    return found


def next_prompt(rng: random.Random, texts: list[list[int]]) -> list[int]:
    """Go on from an earlier text or a part of it, often up to a block's boundary."""
    if not texts:  # on CPUs with AMX, vLLM 0.32's worker dies (SIGILL) of a first prompt of one token
        return rng.choices(VOCABULARY, k=2 * BLOCK_SIZE + 1)
    start = rng.choice(texts) if texts and rng.random() < 0.8 else []
    kept = start[: rng.choice((len(start), len(start) // BLOCK_SIZE * BLOCK_SIZE, rng.randint(0, len(start))))]
    prompt = kept + rng.choices(VOCABULARY, k=rng.choice((0, 1, rng.randint(0, 64), rng.randint(0, 600))))
    if rng.random() < 0.4:
        prompt = prompt[: len(prompt) // BLOCK_SIZE * BLOCK_SIZE]
    return prompt[: CONTEXT - 100] or rng.choices(VOCABULARY, k=1)


async def test_a_whole_engine_reuses_stores_and_removes_the_same(small_engine):
    """One request after another over HTTP: the same cached tokens for each, and the same events over all."""
    config = config_of(small_engine)
    assert config["block_size"] == BLOCK_SIZE
    replica = SimReplica(BlockPool(config["num_gpu_blocks"], BLOCK_SIZE), Limits(max_num_batched_tokens=BATCHED_TOKENS))
    rng, texts, events, differences = random.Random(7), [], [], []
    for number in range(HTTP_REQUESTS):
        if rng.random() < 0.02:
            posted(f"{small_engine.url}/reset_prefix_cache")
            assert replica.reset()
        prompt = next_prompt(rng, texts)
        answer, cached = completed(small_engine, prompt, rng.choice((1, 2, rng.randint(1, 80))))
        name = f"h{number}"
        replica.add(request_of({"id": name, "prompt": prompt, "answer": answer, "priority": 0}, BLOCK_SIZE))
        found = {}
        while replica.has_work:
            step, result = replica.step()
            found |= step.admitted
            events += map(written, result.events)
        if found[name] != cached:
            differences.append((number, len(prompt), found[name], cached))
        texts = [*texts[-7:], prompt + answer]
    translator = Translator()
    assert differences == []
    assert events == [translator.written(event, BLOCK_SIZE) for event in await told(small_engine)]
    assert {event[0] for event in events} == {"S", "R", "C"}


def config_of(engine: Engine) -> dict[str, int]:
    """Block size and number of blocks, as the engine's metrics state them."""
    with urllib.request.urlopen(f"{engine.url}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    labels = next(line for line in text.splitlines() if line.startswith("vllm:cache_config_info{"))
    return {name: int(labels.partition(f'{name}="')[2].partition('"')[0]) for name in ("block_size", "num_gpu_blocks")}
