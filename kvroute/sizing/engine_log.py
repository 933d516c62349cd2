"""What a vLLM start-up log says about the cache, in the wordings of the releases from 0.9 on.

    until 0.27  GPU KV cache size: 396,272 tokens
                Maximum concurrency for 16,384 tokens per request: 24.19x
    since 0.28  both on one line; since 0.32 the first word is the device (GPU, CPU, XPU, ...)

Unknown lines are passed over; a figure that is printed several times (one worker each) is taken at its smallest. Sizes
in the log are GiB rounded to two decimals, so bytes are known to 2^30/200.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from msgspec import Struct

GIB = 1 << 30
FIGURE_DIGITS = 18
LOG_BYTES_LIMIT = 64 << 20
ROUNDING_BYTES = GIB // 200  # half of the last printed digit


class EngineLog(Struct, frozen=True, kw_only=True):
    """The figures of one engine's start; None where the log does not have them."""

    version: str | None = None
    device: str | None = None  # GPU, CPU, ...
    tokens: int | None = None  # reported size of the cache
    max_model_len: int | None = None
    max_concurrency: float | None = None
    available_bytes: int | None = None  # for the cache, on the worker with the least
    available_exact: bool = False  # given by a flag, not rounded for print
    weights_bytes: int | None = None  # of one worker
    graphs_bytes: int | None = None  # CUDA graphs
    utilisation: float | None = None
    blocks_override: int | None = None
    block_size: int | None = None
    cache_dtype: str | None = None
    batched_tokens: int | None = None
    tp: int = 1
    pp: int = 1
    dp: int = 1
    dcp: int = 1
    prefix_caching: bool | None = None
    hybrid: bool = True
    asynchronous: bool | None = None
    served: str | None = None  # what the engine was told to load

    @property
    def release(self) -> tuple[int, int] | None:
        """Major and minor number of the version."""
        found = re.match(r"(\d+)\.(\d+)", self.version or "")
        return (int(found[1]), int(found[2])) if found else None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


def _gib(text: str) -> int:
    return round(float(text) * GIB)


def _figures(pattern: str, read: _Read, text: str) -> list[Any]:
    """Read what a pattern finds. A figure that is none, or larger than any engine's, counts as not printed."""
    values = (_figure(value, read) for value in re.findall(pattern, text))
    return [value for value in values if value is not None]


def _figure(text: str, read: _Read) -> Any:
    try:
        return read(text) if read is str or len(text) <= FIGURE_DIGITS else None
    except ValueError:
        return None


_Read = Callable[[str], Any]
PATTERNS: tuple[tuple[str, str, _Read], ...] = (  # field, pattern with one group, reader
    ("tokens", r"KV cache size: ([\d,]+) tokens", _whole),
    ("device", r"(\w+) KV cache size: [\d,]+ tokens", str),
    ("max_model_len", r"Maximum concurrency for ([\d,]+) tokens per request", _whole),
    ("max_concurrency", r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+)x", float),
    ("available_bytes", r"Available KV cache memory: (-?[\d.]+) GiB", _gib),
    ("available_bytes", r"Explicitly set \(([\d.]+)/[\d.]+\) GiB for KV cache", _gib),
    ("available_bytes", r"reserved ([\d.]+) GiB memory for KV Cache", _gib),
    ("weights_bytes", r"Model loading took ([\d.]+) GiB", _gib),
    ("weights_bytes", r"model weights take ([\d.]+)GiB", _gib),
    ("graphs_bytes", r"Graph capturing finished in \d+ secs, took (-?[\d.]+) GiB", _gib),
    ("version", r"(?:LLM engine \(v|API server version |  version )(\d+\.\d+[\w.+]*)", str),
    ("block_size", r"Setting attention block size to (\d+) tokens", int),
    ("block_size", r"'block_size': (\d+)", int),
    ("utilisation", r"'gpu_memory_utilization': ([\d.]+)", float),
    ("blocks_override", r"num_gpu_blocks_override'?[=:] ?(\d+)", int),
    ("batched_tokens", r"max_num_batched_tokens'?[=:] ?(\d+)", int),
    ("cache_dtype", r"kv_cache_dtype=([\w-]+)", str),
    ("cache_dtype", r"'kv_cache_dtype': '([\w-]+)'", str),
    ("tp", r"tensor_parallel_size=(\d+)", int),
    ("pp", r"pipeline_parallel_size=(\d+)", int),
    ("dp", r"data_parallel_size=(\d+)", int),
    ("dcp", r"decode_context_parallel_size=(\d+)", int),
    ("prefix_caching", r"enable_prefix_caching=(True|False)", "True".__eq__),
    ("asynchronous", r"Asynchronous scheduling is (enabled|disabled)", "enabled".__eq__),
    ("served", r"LLM engine \(v[^)]*\) with config: model='([^']+)'", str),
)
EXACT = r"'kv_cache_memory_bytes': (\d+)"
NOT_HYBRID = re.compile(r"Hybrid KV cache manager is disabled|'disable_hybrid_kv_cache_manager': True")
SMALLEST = frozenset({"tokens", "available_bytes", "max_concurrency"})


def read_log(text: str) -> EngineLog:
    """Read a start-up log, whole or in part."""
    found: dict[str, Any] = {}
    for field, pattern, read in PATTERNS:
        values = _figures(pattern, read, text)
        if values and field not in found:
            found[field] = min(values) if field in SMALLEST else values[-1]
    if exact := _figures(EXACT, int, text):
        found.update(available_bytes=exact[0], available_exact=True)
    return EngineLog(hybrid=NOT_HYBRID.search(text) is None, **found)
