"""Several workers' metrics as those of one router: counters and histograms are added up, gauges as the table says.

A worker that ended takes its counters with it. What it had counted is kept as one more page, so that no sum ever falls:
Prometheus would take a fall for a restart, and count everything again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from statistics import fmean

from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

# Gauges that are each worker's own share. Any other says the same in every worker, but for the moment of a change.
GAUGES: dict[str, Callable[[list[float]], float]] = {
    "kvroute_connections": sum,
    "kvroute_requests_active": sum,
    "kvroute_requests_held": sum,
    "kvroute_holds_now": sum,
    "kvroute_admission_fill": fmean,
    "kvroute_admission_lost": fmean,
    "kvroute_replica_live_conversations": sum,
    "kvroute_replica_live_tokens": sum,
    "kvroute_replica_live_peak_tokens": sum,
    "kvroute_replica_requests_in_flight": sum,
    "kvroute_replica_prefill_tokens_per_second": fmean,
    "kvroute_replica_step_seconds": fmean,
    "kvroute_index_owned_replicas": sum,
    "kvroute_index_blocks": sum,
    "process_open_fds": sum,
    "process_resident_memory_bytes": sum,
    "process_start_time_seconds": min,
    "process_virtual_memory_bytes": sum,
}
GROWING = ("counter", "histogram")

Page = list[Metric]
_Key = tuple[str, tuple[tuple[str, str], ...]]


def read_page(text: str) -> Page:
    """Return the families of Prometheus' text form."""
    return list(text_string_to_metric_families(text))


def counts(page: Iterable[Metric]) -> Page:
    """Return what only grows."""
    return [family for family in page if family.type in GROWING]


def merge(pages: Iterable[Iterable[Metric]]) -> Page:
    """Return one page for several, families and samples in the order in which they first appear."""
    families: dict[str, Metric] = {}
    values: dict[str, dict[_Key, list[float]]] = {}
    for page in pages:
        for family in page:
            families.setdefault(family.name, family)
            found = values.setdefault(family.name, {})
            for sample in family.samples:
                key = (sample.name, tuple(sample.labels.items()))
                found.setdefault(key, []).append(sample.value)
    return [_merged(family, values[name]) for name, family in families.items()]


def _merged(family: Metric, values: dict[_Key, list[float]]) -> Metric:
    how = sum if family.type in GROWING else GAUGES.get(family.name, max)
    merged = Metric(family.name, family.documentation, family.type)
    merged.samples = [Sample(name, dict(labels), how(each)) for (name, labels), each in values.items()]
    return merged
