"""What the caches gave: sums of tokens over time, by replica, model and tenant. `hitrate` makes ratios of them.

Rows are deltas, so that stores of several routers can add them up: (bucket, field, delta).

Rule 1. A bucket is an integer. Multiples of ten are the starts of 10-second buckets, kept for the windows of 1 and 5
        minutes; numbers ending in 1 are the starts of minutes plus 1, kept for the window of 1 hour; 0 is all time.
        `bucket_life_s` says when a bucket can be forgotten.
Rule 2. A field is "<group>|<sum>", the group being "all", "replica=<id>", "model=<name>" or "tenant=<name>".
Rule 3. Labels are cut and cleaned, and there are at most so many of each kind; the rest is counted as "other".
Rule 4. What engines did not report is not guessed: sums whose names begin with `known_` cover only the requests whose
        engine said how many prompt tokens it took from its cache, so that ratios compare like with like.

Not known here: the clock (bucket starts are Unix time, shared by routers), and the store.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

FINE_S = 10
COARSE_S = 60
ALL_TIME = 0
FINE_LIFE_S = 330  # 5 minutes, the bucket under way, and clocks that differ a little
COARSE_LIFE_S = 3_720
LABEL_CHARS_MAX = 128
LABELS_MAX = {"replica": 1024, "model": 256, "tenant": 256}
OTHER = "other"
UNFOLDED_MAX = 4096

SUMS = (
    "requests",
    "prompt_tokens",
    "seen_tokens",  # went through this deployment before, within a bounded window
    "reachable_tokens",  # lay on some replica
    "predicted_tokens",  # lay on the chosen one, as far as the index knew
    "delivered_tokens",  # the engine took from its cache, of the prompt's
    "known_prompt_tokens",
    "known_seen_tokens",
    "known_reachable_tokens",
    "known_predicted_tokens",
    "generated_tokens",  # hits on blocks of earlier answers, beyond what prompts alone explain
    "completion_tokens",
)

Row = tuple[int, str, int]


class Entry(Struct, frozen=True):
    """One finished request; all figures but the last are of its prompt, in tokens."""

    replica: str
    model: str
    tenant: str
    prompt_tokens: int
    seen: int
    reachable: int
    predicted: int
    delivered: int | None = None  # None where the engine did not say
    generated_hits: int = 0
    completion_tokens: int = 0


class Labels:
    """Admits a bounded number of names of each kind, first come first served."""

    def __init__(self, limits: dict[str, int] = LABELS_MAX) -> None:
        self._limits = limits
        self._groups: dict[tuple[str, str], str] = {}
        self._counts = dict.fromkeys(limits, 0)

    def group(self, kind: str, name: str) -> str:
        """Return the group that a name is counted in."""
        known = self._groups.get((kind, name))  # a clean name cleans to itself, so it need not be cleaned again
        if known is not None:
            return known
        name = clean(name)
        known = self._groups.get((kind, name))
        if known is not None:
            return known
        if self._counts[kind] >= self._limits[kind]:
            return f"{kind}={OTHER}"
        self._counts[kind] += 1
        group = self._groups[kind, name] = f"{kind}={name}"
        return group


class Account:
    """Adds up entries until they are drained. Bounded in labels and in buckets, whether or not anybody drains."""

    def __init__(self) -> None:
        self._labels = Labels()
        self._fresh: dict[tuple[int, str, str, str], list[int]] = {}
        self._rows: dict[tuple[int, str], int] = {}

    def add(self, entry: Entry, now_wall_s: float) -> None:
        """Count a finished request."""
        start_s = int(now_wall_s)
        key = (start_s - start_s % FINE_S, entry.replica, entry.model, entry.tenant)
        sums = self._fresh.get(key)
        if sums is None:
            sums = self._fresh[key] = [0] * len(SUMS)
        for place, amount in enumerate(amounts(entry)):
            if amount:
                sums[place] += amount
        if len(self._fresh) > UNFOLDED_MAX:
            self._fold()

    def drain(self) -> list[Row]:
        """Return what was counted since the last call."""
        self._fold()
        rows = [(bucket, field, delta) for (bucket, field), delta in self._rows.items()]
        self._rows.clear()
        return rows

    def _fold(self) -> None:
        """Spread what is fresh over buckets and groups, and drop buckets that no window reaches any more."""
        latest_s = 0
        group = self._labels.group
        for (start_s, replica, model, tenant), sums in self._fresh.items():
            groups = (group("replica", replica), group("model", model), group("tenant", tenant))
            latest_s = max(latest_s, start_s)
            buckets = (start_s, start_s - start_s % COARSE_S + 1, ALL_TIME)
            for field, amount in fields_of(groups, sums):
                for bucket in buckets:
                    key = (bucket, field)
                    self._rows[key] = self._rows.get(key, 0) + amount
        self._fresh.clear()
        if latest_s:
            self._rows = {key: delta for key, delta in self._rows.items() if is_alive(key[0], latest_s)}


def amounts(entry: Entry) -> tuple[int, ...]:
    """Return what an entry adds to each of SUMS."""
    known = entry.delivered is not None
    return (
        1,
        entry.prompt_tokens,
        entry.seen,
        entry.reachable,
        entry.predicted,
        entry.delivered or 0,
        entry.prompt_tokens if known else 0,
        entry.seen if known else 0,
        entry.reachable if known else 0,
        entry.predicted if known else 0,
        entry.generated_hits,
        entry.completion_tokens,
    )


def fields_of(groups: Iterable[str], sums: list[int]) -> Iterable[tuple[str, int]]:
    """Yield field and amount for the whole and for each group; zeros say nothing."""
    for group in ("all", *groups):
        for name, amount in zip(SUMS, sums, strict=True):
            if amount:
                yield f"{group}|{name}", amount


def clean(name: str) -> str:
    """Return a name fit to be a label: printable, without our separator, not long."""
    kept = "".join(char if char.isprintable() and char != "|" else "_" for char in name[:LABEL_CHARS_MAX])
    return kept or "unnamed"


def bucket_life_s(bucket: int) -> int | None:
    """Return how many seconds after its start a bucket is in no window any more; None = it is kept for ever."""
    if bucket == ALL_TIME:
        return None
    return COARSE_LIFE_S if bucket % FINE_S == 1 else FINE_LIFE_S


def is_alive(bucket: int, now_wall_s: float) -> bool:
    """Return whether some window can still reach a bucket."""
    life_s = bucket_life_s(bucket)
    return life_s is None or bucket + life_s > now_wall_s
