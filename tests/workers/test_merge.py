"""Pages of several workers, made by the client library itself, and the page that they become."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from kvroute.workers.merge import Page, counts, merge, read_page


def page(requests: dict[str, int], active: int, healthy: int, durations: Iterable[float]) -> Page:
    """Return a worker's page."""
    registry = CollectorRegistry()
    counter = Counter("kvroute_requests", "Requests", ["outcome"], registry=registry)
    for outcome, count in requests.items():
        counter.labels(outcome).inc(count)
    Gauge("kvroute_requests_active", "Under way", registry=registry).set(active)
    Gauge("kvroute_replica_healthy", "1 while well", ["replica"], registry=registry).labels("r0").set(healthy)
    histogram = Histogram("kvroute_ttft_seconds", "First byte", buckets=(0.1, 1.0), registry=registry)
    for duration in durations:
        histogram.observe(duration)
    return read_page(generate_latest(registry).decode())


def values(merged: Page) -> dict[str, float]:
    """Return samples by how they are written, without the times at which they began."""
    return {
        sample.name + "".join(f" {value}" for value in sample.labels.values()): sample.value
        for family in merged
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


ONE = page({"done": 3, "failed": 1}, active=2, healthy=1, durations=[0.05, 0.5])
TWO = page({"done": 4}, active=5, healthy=1, durations=[5.0])


def test_counters_and_histograms_are_added_up():
    """Each label set by itself, one that only one worker knows included."""
    merged = values(merge([ONE, TWO]))
    assert merged["kvroute_requests_total done"] == 7
    assert merged["kvroute_requests_total failed"] == 1
    assert merged["kvroute_ttft_seconds_bucket 0.1"] == 1
    assert merged["kvroute_ttft_seconds_bucket +Inf"] == merged["kvroute_ttft_seconds_count"] == 3
    assert merged["kvroute_ttft_seconds_sum"] == 5.55


def test_gauges_are_added_up_where_they_are_shares():
    """Requests under way add up; a replica's health is the same seen from anywhere."""
    merged = values(merge([ONE, TWO]))
    assert (merged["kvroute_requests_active"], merged["kvroute_replica_healthy r0"]) == (7, 1)


def test_what_grows_stays_when_a_worker_is_gone():
    """The counts of an ended worker are kept, its gauges are not."""
    merged = values(merge([counts(ONE), TWO]))
    assert (merged["kvroute_requests_total done"], merged["kvroute_requests_active"]) == (7, 5)


def test_the_merged_page_can_be_written_and_read_again():
    """What comes out is a page of Prometheus' text form."""

    class Merged(Collector):
        def collect(self) -> Iterable[Metric]:
            return merge([ONE, TWO])

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Merged())
    assert values(read_page(generate_latest(registry).decode())) == values(merge([ONE, TWO]))
