"""A simulated replica's /metrics: vLLM's names, labels and types over the counters of a SimReplica."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from kvroute.fake.driver import Driver

LABELS = ("engine", "model_name")
EXTERNAL = "from KV connector cross-instance cache sharing, in terms of number of"
FINISH_REASONS = ("stop", "length", "abort", "error", "repetition")


class ReplicaMetrics(Collector):
    """Reads the replica whenever it is scraped."""

    def __init__(self, driver: Driver, model: str) -> None:
        self._driver = driver
        self._replica = driver.replica
        self._timings = driver.timings
        self._labels = ("0", model)
        self._ended = dict.fromkeys(FINISH_REASONS, 0)
        self._started_s = time.time()  # this replica's, which may share its process with others

    def ended(self, reason: str) -> None:
        """Count an answer that ended; clients that left are not counted, as at vLLM."""
        self._ended[reason] += 1

    def exposition(self) -> bytes:
        """Write the text format."""
        return generate_latest(self)

    def collect(self) -> Iterator[Metric]:
        """Yield every family."""
        gauges, counters = self._driver.gauges, self._replica.counters
        yield self._gauge("num_requests_running", "Number of requests in model execution batches.", gauges.running)
        yield self._gauge("num_requests_waiting", "Number of requests waiting to be processed.", gauges.waiting)
        yield self._gauge("kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", gauges.kv_used_fraction)
        yield self._sleep_state()
        for name, text, value in (
            ("prefix_cache_queries", "Prefix cache queries, in terms of queried tokens.", counters.prefix_queries),
            ("prefix_cache_hits", "Prefix cache hits, in terms of cached tokens.", counters.prefix_hits),
            (
                "external_prefix_cache_queries",
                f"External prefix cache queries {EXTERNAL} queried tokens.",
                counters.external_queries,
            ),
            (
                "external_prefix_cache_hits",
                f"External prefix cache hits {EXTERNAL} cached tokens.",
                counters.external_hits,
            ),
            ("num_preemptions", "Cumulative number of preemptions.", counters.preemptions),
            ("prompt_tokens", "Number of prefill tokens processed.", counters.prompt_tokens),
            ("generation_tokens", "Number of generation tokens processed.", counters.generation_tokens),
        ):
            family = CounterMetricFamily(f"vllm:{name}", text, labels=LABELS)
            family.add_metric(self._labels, value)
            yield family
        yield from self._prompt_sources()
        yield self._success()
        for name, text, histogram in self._timings.named():
            timed = HistogramMetricFamily(f"vllm:{name}", text, labels=LABELS)
            timed.add_metric(self._labels, buckets=histogram.cumulated(), sum_value=histogram.sum)
            yield timed
        yield self._cache_config()
        yield GaugeMetricFamily(
            "process_start_time_seconds", "Start time of the process since unix epoch in seconds.", self._started_s
        )

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=LABELS)
        family.add_metric(self._labels, value)
        return family

    def _sleep_state(self) -> Metric:
        level = self._driver.sleep_level
        family = GaugeMetricFamily(
            "vllm:engine_sleep_state", "Engine sleep state; awake = 0 means engine is sleeping.",
            labels=(*LABELS, "sleep_state"),
        )  # fmt: skip
        for state, is_so in (("awake", level is None), ("weights_offloaded", level == 1), ("discard_all", level == 2)):
            family.add_metric((*self._labels, state), is_so)
        return family

    def _prompt_sources(self) -> Iterator[Metric]:
        """Count the tokens of admitted prompts by where they came from: computed, in the cache, or copied from CPU."""
        counters = self._replica.counters
        hits, copied = counters.prefix_hits, counters.external_hits
        found = CounterMetricFamily(
            "vllm:prompt_tokens_cached", "Number of cached prompt tokens (local + external).", labels=LABELS
        )
        found.add_metric(self._labels, hits + copied)
        yield found
        text = "Number of prompt tokens by source."
        sources = CounterMetricFamily("vllm:prompt_tokens_by_source", text, labels=(*LABELS, "source"))
        for source, tokens in (
            ("local_compute", counters.prefix_queries - hits - copied),
            ("local_cache_hit", hits),
            ("external_kv_transfer", copied),
        ):
            sources.add_metric((*self._labels, source), tokens)
        yield sources

    def _success(self) -> Metric:
        family = CounterMetricFamily(
            "vllm:request_success", "Count of successfully processed requests.", labels=(*LABELS, "finished_reason")
        )
        for reason, value in self._ended.items():
            family.add_metric((*self._labels, reason), value)
        return family

    def _cache_config(self) -> Metric:
        pool = self._replica.pool
        config = {
            "block_size": pool.block_size,
            "enable_prefix_caching": True,
            "engine": 0,
            "kv_cache_size_tokens": pool.num_blocks * pool.block_size,
            "num_gpu_blocks": pool.num_blocks,
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the CacheConfig.", labels=tuple(config))
        family.add_metric([str(value) for value in config.values()], 1)
        return family
