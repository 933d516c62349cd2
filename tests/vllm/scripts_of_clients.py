"""Random scripts of another shape than those in `scripts`: clients with habits instead of prompts by chance.

    chat      turns that repeat everything before them, over system prompts that some share
    fan-out   the same prompt many times in one round, as best-of and evaluations send it
    aligned   prompts of whole blocks, asked again as they are, one token longer, one shorter
    storm     long answers that all grow at once, in a pool that cannot hold them
    impatient clients that leave in the middle of a step and ask the same again
    misfit    prompts that never fit, in front of those that do until their client gives up

A script mixes some of them, under settings drawn on their own. Everything follows from the seed.
"""

from __future__ import annotations

import random
from typing import Any

from tests.vllm.scripts import Script

REQUESTS_LIMIT = 150  # of one script
KINDS = ("chat", "fan-out", "aligned", "storm", "impatient", "misfit")


def script_of_clients(seed: int) -> Script:
    """Make a script: the engine's settings, and rounds of adds, aborts, resets and steps."""
    rng = random.Random(f"clients {seed}")
    settings = _settings(rng)
    clients = _Clients(rng, settings)
    return {"settings": settings, "rounds": [clients.round() for _ in range(rng.randint(60, 300))]}


def _settings(rng: random.Random) -> dict[str, Any]:
    size = rng.choice((1, 2, 4, 5, 8, 16, 32))
    return {
        "block_size": size,
        "num_blocks": rng.randint(4, 24) if rng.random() < 0.6 else rng.randint(24, 200),
        "max_num_batched_tokens": rng.choice((size, size + 1, 3, 32, 33, 100, 256, 1024)),
        "max_num_seqs": rng.choice((1, 2, 4, 7, 16, 128)),
        "max_model_len": 1 << 16,
        "long_prefill_token_threshold": rng.choice((0, 0, size, 2 * size - 1, 3)),
        "enable_chunked_prefill": rng.random() < 0.9,
        "reserve_full_prompt": rng.random() < 0.6,
        "watermark": rng.choice((0.0, 0.0, 0.01, 0.05, 0.3)),
        "policy": rng.choice(("fcfs", "priority")),
        "async_scheduling": rng.random() < 0.5,
    }


class _Clients:
    """All clients of one script."""

    def __init__(self, rng: random.Random, settings: dict[str, Any]) -> None:
        self.rng, self.settings = rng, settings
        self.size: int = settings["block_size"]
        self.room = (settings["num_blocks"] - 1) * self.size
        self.kinds = rng.sample(KINDS, rng.randint(1, 4))
        self.systems = [self._tokens(rng.randint(0, max(self.room // 3, 1))) for _ in range(rng.randint(1, 3))]
        self.chats: list[list[int]] = []
        self.asked: list[dict[str, Any]] = []  # the requests of this script, in order
        self.stuck: list[str] = []  # misfits whose clients still wait
        self.rate = rng.choice((0.1, 0.3, 0.7))
        self.resets = rng.choice((0.0, 0.0, 0.02))

    def round(self) -> dict[str, Any]:
        """One round: what happens before the step, and what while it runs."""
        ops: list[list[Any]] = []
        mid: list[str] = []
        if self.stuck and self.rng.random() < 0.3:
            ops.append(["abort", self.stuck.pop()])
        for kind in self.kinds:
            if self.rng.random() < self.rate and len(self.asked) < REQUESTS_LIMIT:
                if kind == "impatient":
                    mid += self._leave(ops)
                else:
                    ops += [["add", request] for request in getattr(self, "_" + kind.replace("-", "_"))()]
        if self.rng.random() < self.resets:
            ops.insert(self.rng.randint(0, len(ops)), ["reset", None])
        return {"ops": ops, "mid": mid}

    def _chat(self) -> list[dict[str, Any]]:
        if not self.chats or self.rng.random() < 0.2:
            self.chats.append(list(self.rng.choice(self.systems)))
        text = self.rng.choice(self.chats)
        text += self._tokens(self.rng.randint(1, 2 * self.size + 3))
        if len(text) > self.room:
            self.chats.remove(text)
            return []
        request = self._request(list(text), self.rng.randint(1, 3 * self.size))
        text += request["answer"]
        return [request]

    def _fan_out(self) -> list[dict[str, Any]]:
        prompt = self._prompt()
        return [self._request(prompt, self.rng.randint(1, 12)) for _ in range(self.rng.randint(2, 9))]

    def _aligned(self) -> list[dict[str, Any]]:
        whole = self._prompt()
        whole = whole[: max(len(whole) // self.size, 1) * self.size]
        near = [whole, whole + self._tokens(1), whole[:-1] or whole, whole[: -self.size] or whole]
        return [self._request(one, self.rng.choice((1, 2, self.size, self.size + 1))) for one in near]

    def _storm(self) -> list[dict[str, Any]]:
        count, share = self.rng.randint(2, 6), max(self.room // 4, 1)
        return [
            self._request(self._prompt()[:share], self.rng.randint(1, max(self.room // 2, 1))) for _ in range(count)
        ]

    def _misfit(self) -> list[dict[str, Any]]:
        if self.rng.random() < 0.8:
            return [self._request(self._prompt(), 2)]
        request = self._request(self._tokens(self.room + self.rng.randint(1, 9)), 1)
        self.stuck.append(request["id"])
        return [request]

    def _leave(self, ops: list[list[Any]]) -> list[str]:
        """Someone leaves in the middle of a step, someone else before it and asks again; both may be over already."""
        if not self.asked:
            return [self._ask_new(ops)]
        gone = self.rng.choice(self.asked[-6:])
        ops.append(["abort", gone["id"]])
        ops.append(["add", self._request(gone["prompt"], len(gone["answer"]))])
        return [self.rng.choice(self.asked[-4:])["id"]]

    def _ask_new(self, ops: list[list[Any]]) -> str:
        request = self._request(self._prompt(), 5)
        ops.append(["add", request])
        return str(request["id"])

    def _prompt(self) -> list[int]:
        base = list(self.rng.choice(self.systems))
        if self.asked and self.rng.random() < 0.4:
            one = self.rng.choice(self.asked[-10:])
            base = one["prompt"] + (one["answer"] if self.rng.random() < 0.5 else [])
        prompt = base + self._tokens(self.rng.choice((0, 1, self.size - 1, self.size, self.rng.randint(0, self.room))))
        return prompt[: self.room] or self._tokens(1)

    def _request(self, prompt: list[int], output: int) -> dict[str, Any]:
        request = {
            "id": f"c{len(self.asked)}",
            "prompt": prompt,
            "answer": self._tokens(output),
            "priority": self.rng.choice((0, 0, 1, 5, -3)) if self.settings["policy"] == "priority" else 0,
            "reads_cache": self.rng.random() < 0.97,
        }
        self.asked.append(request)
        return request

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(1 << 20) for _ in range(count)]
