"""How long one step of an engine takes, from its model's shape and its GPU's figures.

    step = max(compute, memory) + overhead + sequence x (chunks + decodes)

    compute   operations of the weights for every token, prompt or decode, and of attention for every pair of a token
              and one that it attends to: the part that grows with the square of a prompt's length
    memory    the weights once, of experts those that the step's tokens touch, and the cache of every sequence in it
    overhead  launches and bookkeeping, once a step and once a sequence

The arithmetic is that of `kvroute.sizing.speed`; the efficiencies there say which share of a data sheet's figure is
reached. Times are counted in whole femtoseconds: sums of them are exact, so the time of k decode steps at once, in
closed form, equals that of k single ones to the last digit, and a simulation may skip steps without changing a result.

Not known here: links between GPUs (part of the efficiencies), pipelines (stages follow each other within a step), and
how history is spread: decoding sequences are taken to be equally long, which counts too much for layers with a window
where they are not.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cache, lru_cache
from itertools import pairwise
from typing import Protocol

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import ONE_GPU, Parallel, kv_bytes_per_gpu
from kvroute.sizing.hardware import Hardware, gpu
from kvroute.sizing.model import Model
from kvroute.sizing.presets import preset
from kvroute.sizing.speed import (
    DECODE_EFFICIENCY,
    PREFILL_EFFICIENCY,
    attended,
    flops_of,
    prefill_operations,
    reaches,
    weights_s,
)

DEFAULT_MODEL, DEFAULT_GPU = "llama-3.1-8b", "h100"  # the engine that is meant where none is described
FS = 10**15  # femtoseconds in a second
OVERHEAD_S = 0.0005  # assumed, not measured: asynchronous scheduling hides most of it
WEIGHTS_KEPT = 1 << 15  # times to read the weights that are remembered, one for each number of tokens in a step
SEQUENCE_S = 5e-6  # assumed, not measured: sampling and bookkeeping of one sequence


class StepWork(Struct, frozen=True, kw_only=True):
    """What one step computes."""

    prefills: tuple[tuple[int, int], ...] = ()  # for each chunk of a prompt: tokens before it, tokens in it
    decodes: int = 0  # sequences that get their next token
    kv_tokens: int = 0  # tokens in the cache of those sequences before the step, all of which are read


class StepTime(Protocol):
    """The duration of steps, in whole femtoseconds."""

    def step_fs(self, work: StepWork) -> int:
        """Return the duration of a step that computes `work`."""

    def decode_fs(self, steps: int, sequences: int, kv_tokens: int) -> int:
        """Return the duration of `steps` steps that only decode: exactly the sum of their single durations.

        `sequences` is at least 1; their cache holds `kv_tokens` before the first step, and each step adds one for each.
        """


def seconds(fs: int) -> float:
    """Turn femtoseconds into seconds, correctly rounded."""
    return fs / FS


def decode_steps_until(time: StepTime, fs: int, sequences: int, kv_tokens: int, limit: int) -> int:
    """Return how many decode steps it takes until `fs` have passed, at most `limit`."""
    return bisect_left(range(limit), fs, key=lambda steps: time.decode_fs(steps, sequences, kv_tokens))


class _Layers(Struct, frozen=True):
    """Layers of one reach, as times."""

    limit: int | None  # tokens
    pair_fs: int  # to attend from one token to another
    token_fs: int  # to read one token's cache


class RooflineTime:
    """Step times of one engine by what its GPUs can compute and read. `speed` divides all: 10 is ten times as fast.

    Raises:
        ConfigError: a figure that is needed is not known, or an efficiency, an overhead or the speed is out of range.
    """

    def __init__(
        self,
        model: Model,
        hardware: Hardware,
        *,
        parallel: Parallel = ONE_GPU,
        element_bytes: int | None = None,
        eight_bit: bool = False,
        prefill_efficiency: float = PREFILL_EFFICIENCY,
        decode_efficiency: float = DECODE_EFFICIENCY,
        overhead_s: float = OVERHEAD_S,
        sequence_s: float = SEQUENCE_S,
        speed: float = 1.0,
    ) -> None:
        _check(prefill_efficiency, decode_efficiency, overhead_s, sequence_s, speed)
        compute = flops_of(hardware, eight_bit=eight_bit) * parallel.tp * prefill_efficiency * speed / FS
        weights_s(model, hardware, 1)  # what is missing is said now, not in the first step
        bandwidth = hardware.bandwidth_bytes_s * decode_efficiency * speed / FS
        self._token_fs = round(prefill_operations(model, 1, 0)[0] / compute)
        self._layers = tuple(
            _Layers(
                reach.limit_tokens,
                round(reach.pair_operations / compute),
                round(reach.token_bytes / bandwidth),
            )
            for reach in reaches(model, parallel, element_bytes)
        )
        one_engine = Parallel(tp=parallel.tp, dcp=parallel.dcp)
        self._state_fs = round(kv_bytes_per_gpu(model, 0, one_engine, element_bytes) / bandwidth)
        self._overhead_fs = round(overhead_s / speed * FS)
        self._sequence_fs = round(sequence_s / speed * FS)

        @lru_cache(maxsize=WEIGHTS_KEPT)
        def weights_fs(tokens: int) -> int:
            read_s = weights_s(model, hardware, tokens, parallel=parallel, efficiency=decode_efficiency * speed)
            return round(read_s * FS)

        self._weights_fs = weights_fs

    def step_fs(self, work: StepWork) -> int:
        """Return the duration of a step that computes `work`."""
        decodes, kv_tokens = work.decodes, work.kv_tokens
        if not work.prefills:
            return self.decode_fs(1, decodes, kv_tokens) if decodes else self._overhead_fs
        tokens = decodes + sum(count for _, count in work.prefills)
        compute = tokens * self._token_fs
        memory = self._weights_fs(tokens) + decodes * self._state_fs
        for layers in self._layers:
            limit = layers.limit
            pairs, read = _attended_by(decodes, kv_tokens + decodes, limit), _attended_by(decodes, kv_tokens, limit)
            for start, count in work.prefills:
                pairs += attended(limit, start + count) - attended(limit, start)
                read += start if limit is None else min(start, limit)
            compute += pairs * layers.pair_fs
            memory += read * layers.token_fs
        return max(compute, memory) + self._overhead_fs + self._sequence_fs * (decodes + len(work.prefills))

    def decode_fs(self, steps: int, sequences: int, kv_tokens: int) -> int:
        """Return the duration of `steps` steps that only decode, in closed form."""
        total = steps * (self._overhead_fs + self._sequence_fs * sequences)
        edges = {0, steps}
        for layers in self._layers:
            if layers.limit is not None:
                full = -(
                    -(sequences * layers.limit - kv_tokens) // sequences
                )  # the first step that reads a full window
                edges.update(edge for edge in (full - 1, full) if 0 < edge < steps)
        ordered = sorted(edges)
        for start, end in pairwise(ordered):
            total += self._stretch_fs(end - start, sequences, kv_tokens + start * sequences)
        return total

    def _stretch_fs(self, steps: int, sequences: int, kv_tokens: int) -> int:
        """Sum max(compute, memory) over steps in which no window fills up, so that both grow by the same each step."""
        compute, memory = self._decode_terms(sequences, kv_tokens)
        if steps == 1:
            return max(compute, memory)
        next_compute, next_memory = self._decode_terms(sequences, kv_tokens + sequences)
        grows, gap, gap_grows = next_memory - memory, compute - memory, next_compute - compute - next_memory + memory
        reads = steps * memory + grows * (steps * (steps - 1) // 2)
        return reads + _positive_part(gap, gap_grows, steps)

    def _decode_terms(self, sequences: int, kv_tokens: int) -> tuple[int, int]:
        compute = sequences * self._token_fs
        memory = self._weights_fs(sequences) + sequences * self._state_fs
        for layers in self._layers:
            compute += layers.pair_fs * _attended_by(sequences, kv_tokens + sequences, layers.limit)
            memory += layers.token_fs * _attended_by(sequences, kv_tokens, layers.limit)
        return compute, memory


def _attended_by(sequences: int, kv_tokens: int, limit: int | None) -> int:
    return kv_tokens if limit is None else min(kv_tokens, sequences * limit)


def _positive_part(first: int, growth: int, count: int) -> int:
    """Sum max(0, first + growth x i) over the `count` values of i from 0."""
    last = first + growth * (count - 1)
    if first <= 0 and last <= 0:
        return 0
    if first < 0:
        return _positive_part(last, -growth, count)
    if last < 0:
        count = first // -growth + 1
    return count * first + growth * (count * (count - 1) // 2)


def _check(prefill: float, decode: float, overhead_s: float, sequence_s: float, speed: float) -> None:
    for name, value in (("prefill_efficiency", prefill), ("decode_efficiency", decode)):
        if not 0 < value <= 1:
            raise ConfigError(f"{name} must be above 0 and at most 1 (the share of the maker's figure), got {value}")
    for name, value in (("overhead_s", overhead_s), ("sequence_s", sequence_s)):
        if not 0 <= value < 3600:
            raise ConfigError(f"{name} must be from 0 to an hour, got {value}")
    if not 0 < speed < 1e9:
        raise ConfigError(f"speed must be greater than 0, got {speed}")


@cache
def default_time(speed: float = 1.0, overhead_s: float = OVERHEAD_S) -> RooflineTime:
    """Return the step times of an 8B model on one H100, the engine that is meant where none is described."""
    return RooflineTime(preset(DEFAULT_MODEL), gpu(DEFAULT_GPU), speed=speed, overhead_s=overhead_s)
