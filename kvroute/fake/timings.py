"""How long requests to a simulated replica took, in vLLM's histograms.

Names and bounds are those of vLLM 0.32 (vllm/v1/metrics/loggers.py and buckets.py). A sequence counts when its tokens
come and when it finishes by itself; what was aborted is in none but those of its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from itertools import accumulate

FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)


def token_bounds(most: int) -> tuple[float, ...]:
    """Return 1, 2, 5, 10, 20, 50 … up to the first that is not below `most`, as vLLM bounds counts of tokens."""
    found: list[float] = []
    scale = 1
    while True:
        for step in (1, 2, 5):
            if step * scale > most:
                return tuple(found)
            found.append(float(step * scale))
        scale *= 10


class Histogram:
    """Observations counted by bucket."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float) -> None:
        """Count a value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def cumulated(self) -> list[tuple[str, float]]:
        """Return each upper bound with the number of values up to it."""
        names = [*map(str, self.bounds), "+Inf"]
        return list(zip(names, map(float, accumulate(self.counts)), strict=True))


class Clocked:
    """When one sequence came, was admitted, and got its first and its newest token; monotonic seconds."""

    __slots__ = ("admitted_s", "came_s", "first_s", "last_s", "prompt_tokens", "tokens")

    def __init__(self, now_s: float, prompt_tokens: int) -> None:
        self.came_s = self.admitted_s = self.first_s = self.last_s = now_s
        self.prompt_tokens = prompt_tokens
        self.tokens = 0


class Timings:
    """All histograms of one replica."""

    def __init__(self, max_model_len: int) -> None:
        tokens = token_bounds(max_model_len)
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.per_output_token = Histogram(BETWEEN_TOKENS_S)
        self.whole = Histogram(REQUEST_S)
        self.queue = Histogram(REQUEST_S)
        self.prefill = Histogram(REQUEST_S)
        self.decode = Histogram(REQUEST_S)
        self.inference = Histogram(REQUEST_S)
        self.prompt_tokens = Histogram(tokens)
        self.generation_tokens = Histogram(tokens)

    def named(self) -> Iterator[tuple[str, str, Histogram]]:
        """Yield vLLM's name, its text and the histogram."""
        yield "request_prompt_tokens", "Number of prefill tokens processed.", self.prompt_tokens
        yield "request_generation_tokens", "Number of generation tokens processed.", self.generation_tokens
        yield "time_to_first_token_seconds", "Histogram of time to first token in seconds.", self.first_token
        yield "inter_token_latency_seconds", "Histogram of inter-token latency in seconds.", self.between_tokens
        yield (
            "request_time_per_output_token_seconds",
            "Histogram of time_per_output_token_seconds per request.",
            self.per_output_token,
        )
        yield "e2e_request_latency_seconds", "Histogram of e2e request latency in seconds.", self.whole
        for phase, name, histogram in (
            ("WAITING", "queue", self.queue),
            ("RUNNING", "inference", self.inference),
            ("PREFILL", "prefill", self.prefill),
            ("DECODE", "decode", self.decode),
        ):
            yield f"request_{name}_time_seconds", f"Histogram of time spent in {phase} phase for request.", histogram

    def token(self, sequence: Clocked, now_s: float) -> None:
        """Count a sequence's next token."""
        if sequence.tokens:
            self.between_tokens.observe(now_s - sequence.last_s)
        else:
            sequence.first_s = now_s
            self.first_token.observe(now_s - sequence.came_s)
        sequence.last_s = now_s
        sequence.tokens += 1

    def finished(self, sequence: Clocked) -> None:
        """Count a sequence that got its last token."""
        self.whole.observe(sequence.last_s - sequence.came_s)
        self.queue.observe(sequence.admitted_s - sequence.came_s)
        self.inference.observe(sequence.last_s - sequence.admitted_s)
        self.prefill.observe(sequence.first_s - sequence.admitted_s)
        self.decode.observe(sequence.last_s - sequence.first_s)
        self.prompt_tokens.observe(sequence.prompt_tokens)
        self.generation_tokens.observe(sequence.tokens)
        self.per_output_token.observe((sequence.last_s - sequence.first_s) / max(1, sequence.tokens - 1))
