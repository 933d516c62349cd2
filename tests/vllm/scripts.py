"""Random scripts for an engine's scheduler, and the simulated engine's trace of one, in the form of scheduler_probe.

Prompts share prefixes, go on where an answer ended, repeat, and often end on a block's boundary; pools are small enough
for evictions and preemptions. Everything follows from the seed.
"""

from __future__ import annotations

import random
from typing import Any

from kvroute.kv.chain import TokenBytes, blocks_in, chain_of, extend, hashes_of, root_of, tokens_of
from kvroute.kv.pool import BlockPool, CacheEvent, Cleared, Removed, Stored
from kvroute.sim.replica import Limits, RequestId, SimReplica, SimRequest

ROOT = root_of("tiny")
REQUESTS_LIMIT = 120  # of one script: more only wait
Script = dict[str, Any]
Round = dict[str, Any]


def script_of(seed: int) -> Script:
    """Make a script: the engine's settings, and rounds of adds, aborts, resets and steps."""
    rng = random.Random(seed)
    settings = _settings(rng)
    writer = _Writer(rng, settings)
    return {"settings": settings, "rounds": [writer.round() for _ in range(rng.choice((40, 80, 150, 250)))]}


def _settings(rng: random.Random) -> dict[str, Any]:
    return {
        "block_size": rng.choice((1, 2, 3, 4, 4, 4, 8, 16, rng.randint(1, 40))),
        "num_blocks": rng.choice((3, 5, 9, 9, 17, 33, 65, rng.randint(3, 120))),
        "max_num_batched_tokens": rng.choice((1, 2, 5, 8, 16, 16, 64, 64, 512, rng.randint(1, 300))),
        "max_num_seqs": rng.choice((1, 2, 3, 5, 8, 32, rng.randint(1, 64))),
        "max_model_len": 1 << 16,
        "long_prefill_token_threshold": rng.choice((0, 0, 0, 1, 4, 7, rng.randint(1, 40))),
        "enable_chunked_prefill": rng.random() < 0.85,
        "reserve_full_prompt": rng.random() < 0.7,
        "watermark": rng.choice((0.0, 0.0, 0.0, 0.1, 0.25, 0.5 * rng.random())),
        "policy": rng.choice(("fcfs", "fcfs", "priority")),
        "async_scheduling": rng.random() < 0.4,
    }


class _Writer:
    """Writes the rounds of one script."""

    def __init__(self, rng: random.Random, settings: dict[str, Any]) -> None:
        self.rng, self.settings = rng, settings
        self.room = (settings["num_blocks"] - 1) * settings["block_size"]  # tokens that the cache holds
        self.names: list[str] = []
        self.texts: list[list[int]] = [self._tokens(rng.randint(1, self.room)) for _ in range(rng.randint(1, 4))]
        self.rate = rng.choice((0.05, 0.2, 0.5, 1.0))
        self.abort_rate = rng.choice((0.0, 0.0, 0.05, 0.2))
        self.longest_answer = rng.choice((1, 4, 12, 40, 150))
        self.burst = rng.choice((1, 6, 20))

    def round(self) -> dict[str, Any]:
        """One round: what happens before the step, and what while it runs."""
        ops: list[list[Any]] = []
        while self.rng.random() < self.rate and len(ops) < self.burst and len(self.names) < REQUESTS_LIMIT:
            ops.append(["add", self._request()])
        while self.names and self.rng.random() < self.abort_rate:
            ops.append(["abort", self.rng.choice(self.names)])
        if self.rng.random() < 0.03:
            ops.append(["reset", None])
        mid: list[str] = []
        while self.names and self.rng.random() < self.abort_rate:
            mid.append(self.rng.choice(self.names[-8:]))
        return {"ops": ops, "mid": mid}

    def _request(self) -> dict[str, Any]:
        answer = self._tokens(self.rng.randint(1, self.longest_answer))
        prompt = self._prompt()
        self.texts.append(prompt + answer)
        del self.texts[: max(0, len(self.texts) - 12)]
        self.names.append(f"r{len(self.names)}")
        is_urgent = self.settings["policy"] == "priority"
        priority = self.rng.randint(-2, 2) if is_urgent else 0
        return {
            "id": self.names[-1],
            "prompt": prompt,
            "answer": answer,
            "priority": priority,
            "reads_cache": self.rng.random() < 0.95,
        }

    def _prompt(self) -> list[int]:
        """A new text, or the beginning of an earlier one with something new after it; rarely more than fits."""
        start = self.rng.choice(self.texts) if self.rng.random() < 0.8 else []
        kept = self.rng.choice((len(start), len(start), self.rng.randint(0, len(start))))
        prompt = start[:kept] + self._tokens(self.rng.choice((0, 0, 1, self.rng.randint(0, self.room // 2))))
        if self.rng.random() < 0.4:  # end on a boundary
            prompt = prompt[: len(prompt) // self.settings["block_size"] * self.settings["block_size"]]
        longest = self.room if self.rng.random() < 0.97 else self.room + 40
        return prompt[:longest] or self._tokens(1)

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1 << 20) for _ in range(count)]


def simulate(script: Script) -> list[Round]:
    """Play a script on the simulated engine."""
    settings = script["settings"]
    limits = Limits(**{name: settings[name] for name in Limits.__struct_fields__})
    replica = SimReplica(BlockPool(settings["num_blocks"], settings["block_size"]), limits)
    return [_round(replica, each) for each in script["rounds"]]


def _round(replica: SimReplica, script: dict[str, Any]) -> Round:
    for kind, value in script["ops"]:
        if kind == "add":
            replica.add(request_of(value, replica.pool.block_size))
        elif kind == "abort":
            replica.abort(RequestId(value))
        else:
            replica.reset()
    step = replica.begin()
    for name in script["mid"]:
        replica.abort(RequestId(name))
    result = replica.end()
    counters = replica.counters
    return {
        "scheduled": [list(item) for item in step.scheduled.items()],
        "preempted": list(step.preempted),
        "produced": list(result.produced),
        "finished": list(result.finished),
        "admitted": dict(step.admitted),
        "events": [written(event) for event in result.events],
        "free": [block for block, _ in replica.pool.queue()],
        "usage": replica.pool.used_fraction,
        "running": list(replica.running),
        "waiting": list(replica.waiting),
        "totals": [
            counters.prefix_queries,
            counters.prefix_hits,
            counters.resumed_queries,
            counters.resumed_hits,
        ],
    }


def request_of(value: dict[str, Any], block_size: int) -> SimRequest:
    """Make the request of a script's entry."""
    chain = chain_of(tokens_of(value["prompt"] + value["answer"]), block_size, ROOT)
    lengths = len(value["prompt"]), len(value["answer"])
    return SimRequest(RequestId(value["id"]), chain, *lengths, value["priority"], value.get("reads_cache", True))


def written(event: CacheEvent) -> list[Any]:
    """Write one of our events in the form of scheduler_probe."""
    match event:
        case Stored(hashes, parent):
            return ["S", list(hashes), parent]
        case Removed(block_hash):
            return ["R", [block_hash]]
        case Cleared():
            return ["C"]


class Translator:
    """vLLM's events in our hashes: each hash is computed again from the tokens that the event carries."""

    def __init__(self) -> None:
        self._ours: dict[int | str | None, int] = {}

    def written(self, event: list[Any], block_size: int) -> list[Any]:
        """Translate one event; an unknown parent is an error."""
        if event[0] == "C":
            return event
        if event[0] == "R":
            return ["R", [self._ours[each] for each in event[1]]]
        _, hashes, parent, tokens, _ = event
        start = ROOT if parent is None else self._ours[parent]
        made = extend(start, TokenBytes(tokens_of(tokens)), block_size)
        assert blocks_in(made) == len(hashes)
        self._ours.update(zip(hashes, hashes_of(made), strict=True))
        return ["S", list(hashes_of(made)), None if parent is None else start]


def first_difference(script: Script, simulated: list[Round], real: list[Round]) -> str | None:
    """Compare two traces round by round; None where they are equal."""
    translator = Translator()
    block_size = script["settings"]["block_size"]
    cached: dict[str, int] = {}
    totals = [0, 0, 0, 0]
    for number, (ours, theirs) in enumerate(zip(simulated, real, strict=True)):
        cached.update(ours["admitted"])
        events = [translator.written(event, block_size) for event in theirs["events"]]
        totals = [before + more for before, more in zip(totals, theirs["stats"] or (0, 0, 0, 0), strict=True)]
        pairs = {name: (ours[name], theirs[name]) for name in theirs.keys() - {"cached", "stats", "events"}}
        pairs["events"] = (ours["events"], events)
        pairs["cached"] = ({name: cached.get(name) for name in theirs["cached"]}, theirs["cached"])
        pairs["totals"] = (ours["totals"], totals)
        for name, (mine, other) in pairs.items():
            if mine != other:
                return f"round {number}: {name}: simulated {mine}, vLLM {other}; {script['settings']}"
    return None
