"""vLLM's /metrics text -> what a replica said about itself.

Both the current names and those of older releases (`gpu_cache_usage_perc`, `gpu_prefix_cache_*`, 0.9 to 0.11) are
read. One URL can carry several engines (data-parallel ranks), told apart by the `engine` label. Names and their
history: vLLM `v1/metrics/loggers.py`, releases 0.9.2 to 0.33.0.

A page of vLLM's metrics is mostly histograms that routing does not need. Lines of other names are dropped before the
official parser sees the rest, which keeps a scrape under a millisecond.
"""

from __future__ import annotations

from collections import defaultdict
from math import isfinite

from msgspec import Struct
from prometheus_client.parser import text_string_to_metric_families

from kvroute.routing.replica import Load

_GAUGES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used_fraction",
    "vllm:gpu_cache_usage_perc": "kv_used_fraction",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:gpu_prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:gpu_prefix_cache_hits_total": "prefix_hits",
    "vllm:prompt_tokens_total": "prompt_tokens",
    "vllm:generation_tokens_total": "generation_tokens",
}
_COUNTERS = ("prefix_queries", "prompt_tokens", "generation_tokens")
_CONFIG = "vllm:cache_config_info"
_SLEEP = "vllm:engine_sleep_state"
_START = "process_start_time_seconds"
_WANTED = (*_GAUGES, _CONFIG, _SLEEP, _START)
DIGITS_MAX = 15  # of a size in tokens or blocks; a longer number is no size
PAGE_BYTES_MAX = 16 << 20


class EngineReport(Struct, frozen=True):
    """One engine's part of a page."""

    engine: int  # data-parallel rank, 0 where there is one engine
    load: Load
    block_size: int | None = None  # tokens per block of the full-attention group
    capacity_tokens: int | None = None  # tokens that its KV cache holds
    prefix_caching: bool | None = None  # None where the page does not say


class Page(Struct, frozen=True):
    """A whole scrape."""

    engines: tuple[EngineReport, ...]
    started_s: float | None = None  # Unix time at which the server process started: another value is another life
    is_asleep: bool = False  # its engines compute nothing until they are woken

    def is_new_life(self, before: Page) -> bool:
        """Return whether the server was restarted since an earlier page.

        Its start time says so. Where a page has none (several API servers share one page), a total that fell does:
        no counter of a living engine falls.
        """
        if self.started_s is not None and before.started_s is not None:
            return self.started_s != before.started_s
        totals, totals_before = self._totals(), before._totals()
        return any(totals.get(key, 0) < total for key, total in totals_before.items())

    def _totals(self) -> dict[tuple[int, str], int]:
        return {(report.engine, name): getattr(report.load, name) for report in self.engines for name in _COUNTERS}


def read_page(text: str, now: float) -> Page:
    """Read a page of metrics; unknown names are ignored, missing ones stay at their defaults.

    Args:
        text: Prometheus text exposition.
        now: router's clock, kept as the time of the report.

    Raises:
        ValueError: a line that we need is malformed.
    """
    values: dict[int, dict[str, float]] = defaultdict(dict)
    configs: dict[int, dict[str, str]] = {}
    started_s = None
    is_awake = None
    for family in text_string_to_metric_families(_wanted_lines(text)):
        for sample in family.samples:
            if sample.name == _START:
                started_s = sample.value
                continue
            if sample.name == _SLEEP:
                if sample.labels.get("sleep_state") == "awake":
                    is_awake = bool(is_awake) or sample.value > 0
                continue
            engine = int(sample.labels.get("engine") or 0)
            if sample.name == _CONFIG:
                configs[engine] = sample.labels
            elif field := _GAUGES.get(sample.name):
                seen = values[engine]
                seen[field] = seen.get(field, 0.0) + sample.value  # one series per served model name
    engines = sorted(values.keys() | configs.keys())
    return Page(
        engines=tuple(
            _report(engine, values[engine], configs.get(engine, {}), len(engines), now) for engine in engines
        ),
        started_s=started_s,
        is_asleep=is_awake is False,
    )


def _wanted_lines(text: str) -> str:
    kept = [line for line in text.splitlines() if line.startswith(_WANTED)]
    return "\n".join(kept) + "\n"


def _report(engine: int, values: dict[str, float], config: dict[str, str], engines: int, now: float) -> EngineReport:
    fraction = values.pop("kv_used_fraction", 0.0)
    fraction = min(max(fraction, 0.0), 1.0) if isfinite(fraction) else 0.0
    counts = {field: int(value) for field, value in values.items() if isfinite(value)}
    block_size = _number(config, "effective_attention_block_size") or _number(config, "block_size")
    return EngineReport(
        engine=engine,
        load=Load(kv_used_fraction=fraction, at_s=now, **counts),
        block_size=block_size,
        capacity_tokens=_capacity(config, block_size, engines),
        prefix_caching={"True": True, "False": False}.get(config.get("enable_prefix_caching", "")),
    )


def _capacity(config: dict[str, str], block_size: int | None, engines: int) -> int | None:
    if tokens := _number(config, "kv_cache_size_tokens"):
        return tokens
    blocks = _number(config, "num_gpu_blocks")
    if not blocks or not block_size:
        return None
    # Under data parallelism the block count is the sum over engines, repeated on each one's series; one block of an
    # engine is never used.
    return (blocks // engines - 1) * block_size


def _number(labels: dict[str, str], name: str) -> int | None:
    text = labels.get(name, "None")
    return int(text) if text.isdecimal() and len(text) <= DIGITS_MAX else None
