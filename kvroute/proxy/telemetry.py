"""The counters of all parts in Prometheus' form. Parts count in plain integers; this reads them when somebody scrapes.

That keeps counting off the way of a request: a labelled counter of the official client costs microseconds a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec import Struct
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from kvroute.adapters.tokens import PromptReader
from kvroute.proxy.feeds import FeedStats
from kvroute.proxy.stats import HandlerStats, Histogram
from kvroute.routing.fleet import Fleet, ReplicaState
from kvroute.routing.shadow import Tally
from kvroute.routing.standing import Live, Standing

HANDLER_COUNTERS = {
    "retries": "Attempts at another replica after one failed before the first byte",
    "refused_reservations": "Places that another router took first",
    "lookups": "Index lookups",
    "unread_prompts": "Requests placed by load alone, because their prompt was not understood",
    "unexpected_errors": "Requests that failed by a mistake of the router itself",
    "answers_learnt": "Answers whose generated blocks went into the index",
    "answers_not_learnt": "Answers whose generated blocks could not be known from outside",
}
REPLICA_GAUGES: dict[str, tuple[str, Callable[[ReplicaState], float]]] = {
    "healthy": ("1 while health checks pass", lambda state: state.is_healthy),
    "available": ("1 while new requests may go there", lambda state: state.is_available),
    "draining": ("1 while it is drained", lambda state: state.is_draining),
    "requests_in_flight": ("Requests of this router there", lambda state: state.promised.requests),
    "promised_prefill_tokens": ("Prompt tokens promised by all routers and not begun",
                                lambda state: state.promised.prefill_tokens + state.others.prefill_tokens),
    "promised_kv_tokens": ("KV tokens promised by all routers",
                           lambda state: state.promised.kv_tokens + state.others.kv_tokens),
    "kv_used_fraction": ("KV cache in use by running requests, as last reported",
                         lambda state: state.load.kv_used_fraction),
    "prefill_tokens_per_second": ("Prefill rate as learnt", lambda state: 1 / state.rates.token_s),
    "step_seconds": ("Decode step of an empty batch as learnt", lambda state: state.rates.step_s),
}  # fmt: skip
LIVE_GAUGES: dict[str, tuple[str, Callable[[Live], float]]] = {
    "live_conversations": ("Conversations that live there", lambda live: live.conversations),
    "live_tokens": ("KV tokens that they hold now", lambda live: live.now_tokens),
    "live_peak_tokens": ("KV tokens that they will probably hold at most", lambda live: live.peak_tokens),
}
SHADOW_COUNTERS = {
    "placements": "Placements about which a shadow policy was asked",
    "same": "Of these, where it chose the same replica",
    "prompt_tokens": "Prompt tokens of these",
    "cost_seconds": "Seconds predicted for the shadow's choices",
    "our_cost_seconds": "Seconds predicted for the choices that were followed",
    "hit_tokens": "Hits predicted for the shadow's choices",
    "our_hit_tokens": "Hits predicted for the choices that were followed",
    "failures": "Times that a shadow policy failed",
}
READER_COUNTERS = {
    "cache_hits": "Prompts whose start was tokenised before",
    "cache_misses": "Prompts that were wholly new",
    "ask_failures": "Prompts about which no replica gave a usable answer",
    "approximated": "Prompts hashed as chunks of text",
}
EVENT_FIGURES: dict[str, tuple[type[GaugeMetricFamily] | type[CounterMetricFamily], str, tuple[str, ...]]] = {
    "distrusted": (GaugeMetricFamily, "1 while a replica delivers less than predicted", ("distrusted",)),
    "gpu_blocks": (GaugeMetricFamily, "Blocks that can be hit on the GPU; of streams owned here", ("blocks", "GPU")),
    "suspect_blocks": (GaugeMetricFamily, "Blocks that may be gone, after lost events", ("suspects",)),
    "batches": (CounterMetricFamily, "Batches of events taken in", ("batches",)),
    "gaps": (CounterMetricFamily, "Times that batches were lost for good", ("gaps",)),
    "malformed": (CounterMetricFamily, "Batches that could not be read", ("malformed",)),
    "lives": (CounterMetricFamily, "Restarts seen in the stream", ("lives",)),
    "stored_blocks": (CounterMetricFamily, "Blocks stored", ("of_blocks", "stored")),
    "removed_blocks": (CounterMetricFamily, "Blocks removed", ("of_blocks", "removed")),
    "unknown_parents": (
        CounterMetricFamily,
        "Blocks below one that was never heard of",
        ("of_blocks", "unknown_parents"),
    ),
    "mismatched_blocks": (CounterMetricFamily, "Blocks of another size", ("of_blocks", "mismatches")),
}
STORE_GAUGES = {"owned_replicas", "blocks", "ledger_routers"}  # the store's other figures only grow


class Telemetry(Collector):
    """Reads every part once a scrape."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        handler: HandlerStats,
        feeds: FeedStats,
        readers: Mapping[str, PromptReader],
        store: Callable[[], Mapping[str, int]],
        connections: Callable[[], Mapping[str, int]] = lambda: {},
        knowledge: Callable[[], list[dict[str, Any]]] = lambda: [],
        standing: Callable[[], Standing | None] = lambda: None,
        shadows: Callable[[], tuple[Tally, ...]] = lambda: (),
    ) -> None:
        self._fleet = fleet
        self._handler = handler
        self._feeds = feeds
        self._readers = readers
        self._store = store
        self._connections = connections
        self._knowledge = knowledge
        self._standing = standing
        self._shadows = shadows

    def collect(self) -> Iterable[Metric]:
        """Yield every metric."""
        yield from self._of_handler()
        connections = GaugeMetricFamily("kvroute_connections", "Open connections, idle ones included", labels=["side"])
        for side, count in self._connections().items():
            connections.add_metric([side], count)
        yield connections
        yield from self._of_replicas()
        yield from self._of_readers()
        yield from _counters("feeds", self._feeds, "Watching replicas")
        yield from self._of_events()
        yield from self._of_shadows()
        for name, value in self._store().items():
            kind = GaugeMetricFamily if name in STORE_GAUGES else CounterMetricFamily
            yield kind(f"kvroute_{_prefixed(name)}", f"Shared store: {name.replace('_', ' ')}", value)

    def _of_handler(self) -> Iterable[Metric]:
        stats = self._handler
        requests = CounterMetricFamily("kvroute_requests", "Requests by outcome", labels=["outcome", "status"])
        for (outcome, status), count in sorted(stats.requests.items()):
            requests.add_metric([outcome, str(status)], count)
        yield requests
        yield GaugeMetricFamily("kvroute_requests_active", "Requests under way", stats.active)
        yield GaugeMetricFamily("kvroute_requests_held", "Of these, waiting for a replica", stats.held)
        yield from self._of_holds()
        for name, text in HANDLER_COUNTERS.items():
            yield CounterMetricFamily(f"kvroute_{name}", text, getattr(stats, name))
        yield _histogram("kvroute_ttft_seconds", "Time to the first byte of a stream", stats.ttft)
        yield _histogram("kvroute_request_seconds", "Time to the end of an answer", stats.total)

    def _of_holds(self) -> Iterable[Metric]:
        holds = self._handler.holds
        yield GaugeMetricFamily("kvroute_holds_now", "Requests held until memory fits", holds.now)
        yield CounterMetricFamily("kvroute_holds_begun", "Requests that were held", holds.begun)
        ended = CounterMetricFamily("kvroute_holds_ended", "Holds by what ended them", labels=["outcome"])
        for outcome, count in holds.ended.items():
            ended.add_metric([outcome], count)
        yield ended
        yield CounterMetricFamily("kvroute_holds_refused", "Requests for which too much was held", holds.refused)
        yield GaugeMetricFamily("kvroute_hold_longest_seconds", "The longest hold that has ended", holds.longest_s)
        yield _histogram("kvroute_hold_seconds", "Time that held requests waited", holds.time)
        if (standing := self._standing()) is not None:
            yield GaugeMetricFamily("kvroute_admission_fill", "Share of caches to reserve", standing.fill)
            yield GaugeMetricFamily("kvroute_admission_lost", "Share of caches lost between turns", standing.lost)
            for name, (text, read) in LIVE_GAUGES.items():
                gauge = GaugeMetricFamily(f"kvroute_replica_{name}", text, labels=["replica"])
                for live in standing.live:
                    gauge.add_metric([live.replica], read(live))
                yield gauge

    def _of_shadows(self) -> Iterable[Metric]:
        tallies = self._shadows()
        for name, text in SHADOW_COUNTERS.items() if tallies else ():
            counter = CounterMetricFamily(f"kvroute_shadow_{name}", text, labels=["policy"])
            for tally in tallies:
                counter.add_metric([tally.policy], getattr(tally, name.replace("seconds", "s")))
            yield counter

    def _of_replicas(self) -> Iterable[Metric]:
        states = self._fleet.states()
        for name, (text, read) in REPLICA_GAUGES.items():
            gauge = GaugeMetricFamily(f"kvroute_replica_{name}", text, labels=["replica"])
            for state in states:
                gauge.add_metric([state.replica.id], float(read(state)))
            yield gauge

    def _of_events(self) -> Iterable[Metric]:
        rows = self._knowledge()
        state = GaugeMetricFamily("kvroute_events", "What a replica's KV events are worth", labels=["replica", "state"])
        for row in rows:
            state.add_metric([row["replica"], row["events"]], 1)
        yield state
        for name, (kind, text, path) in EVENT_FIGURES.items():
            metric = kind(f"kvroute_events_{name}", text, labels=["replica"])
            for row in rows:
                value: Any = row
                for key in path:
                    value = value.get(key) if isinstance(value, dict) else None
                if value is not None:
                    metric.add_metric([row["replica"]], float(value))
            yield metric

    def _of_readers(self) -> Iterable[Metric]:
        mode = GaugeMetricFamily(
            "kvroute_tokens_mode", "How prompts become tokens, and why", labels=["model", "mode", "why"]
        )
        for model, reader in self._readers.items():
            mode.add_metric([model, reader.mode, reader.why], 1)
        yield mode
        for name, text in READER_COUNTERS.items():
            counter = CounterMetricFamily(f"kvroute_tokens_{name}", text, labels=["model"])
            for model, reader in self._readers.items():
                counter.add_metric([model], getattr(reader, name))
            yield counter


def _prefixed(name: str) -> str:
    """Return a figure's name with its part of the store in front; the index's own names have none."""
    return name if name.startswith(("ledger_", "link_", "server_")) else f"index_{name}"


def _histogram(name: str, text: str, histogram: Histogram) -> Metric:
    return HistogramMetricFamily(name, text, buckets=histogram.cumulative(), sum_value=histogram.sum_s)


def _counters(prefix: str, stats: Struct, text: str) -> Iterable[Metric]:
    for name in stats.__struct_fields__:
        yield CounterMetricFamily(f"kvroute_{prefix}_{name}", f"{text}: {name.replace('_', ' ')}", getattr(stats, name))
