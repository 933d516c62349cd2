"""From the account's rows to the hit rate, and to where the rest was lost.

    prompt  >=  seen  >=  reachable  >=  predicted  ~  delivered
                  eviction    routing        index

Each loss is the difference of two neighbours, in tokens. Ratios are ratios of sums, never means of ratios: a prompt
counts by its tokens. A ratio without anything to divide by is None.

A window of W seconds takes in the bucket under way and the W / width before it: at least W seconds, at most one bucket
more.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from kvroute.routing.account import ALL_TIME, COARSE_S, FINE_S, SUMS, Row

WINDOWS_S = {"1m": (60, FINE_S), "5m": (300, FINE_S), "1h": (3600, COARSE_S)}
ALL = "all"


class Shares(Struct, frozen=True):
    """Sums of tokens over one window and one group, and what follows from them."""

    requests: int
    prompt_tokens: int
    seen_tokens: int
    reachable_tokens: int
    predicted_tokens: int
    delivered_tokens: int
    known_prompt_tokens: int  # `known_*`: of the requests whose engine reported what it took from its cache
    known_seen_tokens: int
    known_reachable_tokens: int
    known_predicted_tokens: int
    generated_tokens: int  # of `delivered_tokens`: hits on blocks of earlier answers that nobody could foresee
    completion_tokens: int
    hit_rate: float | None  # delivered / prompt
    seen_share: float | None  # seen / prompt
    reachable_share: float | None  # reachable / prompt
    predicted_share: float | None  # predicted / prompt
    delivered_of_reachable: float | None  # delivered without generated / reachable
    predicted_of_delivered: float | None  # the same delivered; near 1 where the index tells the truth
    lost_to_eviction_tokens: int  # seen - reachable
    lost_to_routing_tokens: int  # reachable - predicted
    lost_to_index_tokens: int  # predicted - delivered; negative where the engine held more than was known


class Window(Struct, frozen=True):
    """One window, whole and by label."""

    total: Shares
    by_replica: dict[str, Shares]
    by_model: dict[str, Shares]
    by_tenant: dict[str, Shares]


class HitRate(Struct, frozen=True):
    """What the hit-rate endpoint answers: window -> figures."""

    windows: dict[str, Window]


def hit_rate(rows: Iterable[Row], now_wall_s: float) -> HitRate:
    """Add up rows, of any number of routers, over 1m, 5m, 1h and all time.

    Args:
        rows: (bucket, field, delta) as `Account.drain` makes them; unknown fields are ignored.
        now_wall_s: Unix time.
    """
    sums: dict[str, dict[str, dict[str, int]]] = {name: {} for name in (*WINDOWS_S, ALL)}
    for bucket, field, delta in rows:
        group, _, name = field.rpartition("|")
        for window in windows_of(bucket, now_wall_s):
            of_group = sums[window].setdefault(group, {})
            of_group[name] = of_group.get(name, 0) + delta
    return HitRate({name: window_of(groups) for name, groups in sums.items()})


def windows_of(bucket: int, now_wall_s: float) -> list[str]:
    """Return the windows that a bucket counts in."""
    if bucket == ALL_TIME:
        return [ALL]
    width = COARSE_S if bucket % FINE_S == 1 else FINE_S
    start_s = bucket - bucket % FINE_S
    now_start_s = int(now_wall_s) // width * width
    return [name for name, (span_s, of) in WINDOWS_S.items() if of == width and start_s >= now_start_s - span_s]


def window_of(groups: dict[str, dict[str, int]]) -> Window:
    """Return the figures of one window."""

    def by(kind: str) -> dict[str, Shares]:
        start = f"{kind}="
        return {group[len(start) :]: shares_of(groups[group]) for group in sorted(groups) if group.startswith(start)}

    return Window(shares_of(groups.get("all", {})), by("replica"), by("model"), by("tenant"))


def shares_of(sums: dict[str, int]) -> Shares:
    """Return the ratios and losses of one group's sums."""
    full = {name: sums.get(name, 0) for name in SUMS}
    prompt, reachable, delivered = full["prompt_tokens"], full["reachable_tokens"], full["delivered_tokens"]
    known_predicted = full["known_predicted_tokens"]
    of_prompts = delivered - full["generated_tokens"]  # hits on blocks that an earlier prompt had brought
    return Shares(
        **full,
        hit_rate=ratio(delivered, full["known_prompt_tokens"]),
        seen_share=ratio(full["seen_tokens"], prompt),
        reachable_share=ratio(reachable, prompt),
        predicted_share=ratio(full["predicted_tokens"], prompt),
        delivered_of_reachable=ratio(of_prompts, full["known_reachable_tokens"]),
        predicted_of_delivered=ratio(known_predicted, of_prompts),
        lost_to_eviction_tokens=full["seen_tokens"] - reachable,
        lost_to_routing_tokens=reachable - full["predicted_tokens"],
        lost_to_index_tokens=known_predicted - of_prompts,
    )


def ratio(part: int, whole: int) -> float | None:
    """Return a ratio of sums, None where there is nothing to divide by."""
    return part / whole if whole else None
