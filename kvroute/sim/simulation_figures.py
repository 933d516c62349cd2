"""What a run is summed up to, in bounded memory: sums, quantiles from buckets 0.5 % wide, and series over time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from math import floor, log

from msgspec import Struct

WIDTH = log(1.005)
LEAST_S = 1e-6
SERIES_BINS = 240


class Spread(Struct, frozen=True):
    """A distribution, in seconds unless said otherwise."""

    count: int = 0
    mean: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p99: float = 0.0
    most: float = 0.0


class Histogram:
    """Values from a microsecond on, with quantiles within 0.25 %, means and extremes exact."""

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.most = 0.0
        self._buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Count a value."""
        self.count += 1
        self.total += value
        if value > self.most:
            self.most = value
        key = floor(log(value / LEAST_S) / WIDTH) if value > LEAST_S else -1
        self._buckets[key] = self._buckets.get(key, 0) + 1

    def quantile(self, share: float) -> float:
        """Return the value that `share` of all values do not exceed."""
        wanted, seen = max(share * self.count, 1), 0
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            if seen >= wanted:
                return min(middle(key), self.most)
        return 0.0

    def spread(self) -> Spread:
        """Return the distribution in a few figures."""
        if not self.count:
            return Spread()
        p50, p90, p99 = (self.quantile(share) for share in (0.5, 0.9, 0.99))
        return Spread(self.count, self.total / self.count, p50, p90, p99, self.most)

    def curve(self, points: int = 60) -> tuple[tuple[float, float], ...]:
        """Return (value, share of values up to it), at most about `points` of them."""
        found, seen, last = [], 0, -1.0
        for key in sorted(self._buckets):
            seen += self._buckets[key]
            share = seen / self.count
            if share - last >= 1 / points or seen == self.count:
                found.append((self.most if seen == self.count else min(middle(key), self.most), share))
                last = share
        return tuple(found)


def middle(key: int) -> float:
    """Return the value that stands for a bucket."""
    return 0.0 if key < 0 else LEAST_S * 1.005 ** (key + 0.5)


class Series:
    """Means of a value over time in at most SERIES_BINS bins; when they are full, two become one."""

    def __init__(self, width_s: float = 1.0) -> None:
        self.width_s = width_s
        self._sums: list[float] = []
        self._counts: list[int] = []

    def add(self, at_s: float, value: float) -> None:
        """Count a value at a time."""
        place = int(at_s / self.width_s)
        while place >= SERIES_BINS:
            self._halve()
            place = int(at_s / self.width_s)
        missing = place + 1 - len(self._sums)
        if missing > 0:
            self._sums += [0.0] * missing
            self._counts += [0] * missing
        self._sums[place] += value
        self._counts[place] += 1

    def spread(self, since_s: float, until_s: float, amount: float) -> None:
        """Count an amount that came evenly over a time."""
        self.add(until_s, 0.0)
        first, last, width_s = int(since_s / self.width_s), int(until_s / self.width_s), self.width_s
        if first == last or until_s <= since_s:
            self._sums[last] += amount
            return
        rate = amount / (until_s - since_s)
        self._sums[first] += rate * ((first + 1) * width_s - since_s)
        for place in range(first + 1, last):
            self._sums[place] += rate * width_s
        self._sums[last] += rate * (until_s - last * width_s)

    def means(self) -> tuple[tuple[float, float], ...]:
        """Return (time, mean of the values then)."""
        return tuple(
            ((place + 0.5) * self.width_s, total / count)
            for place, (total, count) in enumerate(zip(self._sums, self._counts, strict=True))
            if count
        )

    def rates(self) -> tuple[tuple[float, float], ...]:
        """Return (time, sum of the values then, a second)."""
        return tuple(((place + 0.5) * self.width_s, total / self.width_s) for place, total in enumerate(self._sums))

    def _halve(self) -> None:
        self.width_s *= 2
        for name in ("_sums", "_counts"):
            values = getattr(self, name)
            odd = [*values, 0] if len(values) % 2 else values
            setattr(self, name, [a + b for a, b in zip(odd[::2], odd[1::2], strict=True)])


class Phase(Struct, frozen=True, kw_only=True):
    """What conversations came to that began in one part of a run, or were one tenant's."""

    begin_s: float
    completed: int  # requests, of whatever turn
    failed: int
    prompt_tokens: int
    hit_tokens: int
    output_tokens: int
    last_s: float  # when the last answer ended
    ttft: Spread
    end_to_end: Spread
    held: Spread


class PhaseFigures:
    """The mutable side of `Phase`."""

    def __init__(self, begin_s: float) -> None:
        self.begin_s = self.last_s = begin_s
        self.failed = self.prompt_tokens = self.hit_tokens = self.output_tokens = 0
        self.ttft, self.end_to_end, self.held = Histogram(), Histogram(), Histogram()

    def outcome(self) -> Phase:
        """Sum up."""
        return Phase(
            begin_s=self.begin_s,
            completed=self.end_to_end.count,
            failed=self.failed,
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            output_tokens=self.output_tokens,
            last_s=self.last_s,
            ttft=self.ttft.spread(),
            end_to_end=self.end_to_end.spread(),
            held=self.held.spread(),
        )


class Stage(Struct, frozen=True, kw_only=True):
    """A part of a run that began when everything before it had ended."""

    requests: int
    span_s: float  # from its first request to its last answer
    output_tokens: int
    ttft: Spread

    @property
    def output_tokens_s(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.span_s if self.span_s else 0.0


class Outcomes(Struct, frozen=True, kw_only=True):
    """One run, summed up. Tokens, seconds, or counts."""

    policy: str
    seed: int
    requests: int  # sent
    completed: int
    failed: int  # refused, given up, or broken off
    first_failure: str = ""  # why the first of them did
    retried: int
    cut: int  # answers shortened to what the cache can hold
    scripts: int  # conversations that came to their end
    lost: int  # conversations that ended with a failed request
    span_s: float  # from the first request to the last answer
    prompt_tokens: int  # of completed prefills
    hit_tokens: int
    reachable_tokens: int  # hits of one cache of unlimited size
    refault_tokens: int  # computed again by a replica that had them and evicted them
    recomputed_tokens: int  # computed again after a preemption
    output_tokens: int
    preemptions: int
    imbalance: float  # most tokens computed by one replica, over the mean
    ttft: Spread  # from arrival to the first token, held time included
    token_time: Spread  # from one token to the next, a mean for each answer
    end_to_end: Spread
    held: Spread  # of requests that were held
    conversation: Spread  # from a conversation's first request to its last answer; of one request where loops are open
    phases: tuple[Phase, ...] = ()
    tenants: dict[str, Phase] = {}
    ttft_curve: tuple[tuple[float, float], ...] = ()  # (seconds, share of requests)
    throughput: tuple[tuple[float, float], ...] = ()  # (time, output tokens a second)
    waiting: tuple[tuple[float, float], ...] = ()  # (time, requests in engines' queues and held)
    cache_used: tuple[tuple[float, float], ...] = ()  # (time, share of the caches that running requests hold)
    stages: tuple[Stage, ...] = ()  # of a workload that has some, those in which a request was counted

    @property
    def hit_share(self) -> float:
        """Share of prompt tokens that were hits."""
        return self.hit_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def reachable_share(self) -> float:
        """Share of prompt tokens that one cache of unlimited size would have hit."""
        return self.reachable_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def reached_share(self) -> float:
        """Share of the reachable hits that were made."""
        return self.hit_tokens / self.reachable_tokens if self.reachable_tokens else 0.0

    @property
    def output_tokens_s(self) -> float:
        """Generated tokens a second."""
        return self.output_tokens / self.span_s if self.span_s else 0.0


class Figures:
    """The mutable side of `Outcomes`."""

    def __init__(self, phases_s: tuple[float, ...] = (), *, by_tenant: bool = False) -> None:
        self._tenants: dict[str, PhaseFigures] | None = {} if by_tenant else None
        self._ends_s = phases_s
        self._phases = [PhaseFigures(begin_s) for begin_s in (0.0, *phases_s)] if phases_s else []
        self.requests = self.completed = self.failed = self.retried = self.cut = self.scripts = self.lost = 0
        self.prompt_tokens = self.hit_tokens = self.reachable_tokens = self.refault_tokens = self.output_tokens = 0
        self.first_failure = ""
        self.first_s: float | None = None
        self.last_s = 0.0
        self.ttft, self.token_time, self.end_to_end = Histogram(), Histogram(), Histogram()
        self.held, self.conversation = Histogram(), Histogram()
        self.throughput, self.waiting, self.cache_used = Series(), Series(), Series()
        self.stages: list[Stage] = []
        self._stage_first_s: float | None = None
        self._stage_ttft = Histogram()
        self._stage_before = 0, 0  # requests and output tokens of the stages that are over

    def arrive(self, now_s: float) -> None:
        """Count a request."""
        self.requests += 1
        if self.first_s is None:
            self.first_s = now_s
        if self._stage_first_s is None:
            self._stage_first_s = now_s

    def begin(self, ttft_s: float) -> None:
        """Count a first token."""
        self.ttft.add(ttft_s)
        self._stage_ttft.add(ttft_s)

    def finish(self, began_s: float, now_s: float, output_tokens: int) -> None:
        """Count the tokens of an answer that is complete."""
        self.output_tokens += output_tokens
        self.throughput.spread(began_s, now_s, output_tokens)

    def end_stage(self) -> None:
        """Sum up what came since the last stage ended."""
        if self._stage_first_s is not None:
            requests, tokens = self._stage_before
            self.stages.append(
                Stage(
                    requests=self.requests - requests,
                    span_s=max(self.last_s - self._stage_first_s, 0.0),
                    output_tokens=self.output_tokens - tokens,
                    ttft=self._stage_ttft.spread(),
                )
            )
        self._stage_first_s, self._stage_ttft = None, Histogram()
        self._stage_before = self.requests, self.output_tokens

    def parts(self, began_s: float, tenant: str) -> Sequence[PhaseFigures]:
        """Return where else a request counts: in the phase in which its conversation began, and with its tenant's."""
        if not self._phases and self._tenants is None:
            return ()
        parts = [self._phases[bisect_right(self._ends_s, began_s)]] if self._phases else []
        if self._tenants is not None:
            parts.append(self._tenants.setdefault(tenant, PhaseFigures(0.0)))
        return parts

    def outcomes(
        self, policy: str, seed: int, computed_tokens: list[int], preemptions: int, recomputed_tokens: int
    ) -> Outcomes:
        """Sum up."""
        if self.stages:
            self.end_stage()
        mean = sum(computed_tokens) / max(len(computed_tokens), 1)
        return Outcomes(
            policy=policy,
            seed=seed,
            requests=self.requests,
            completed=self.completed,
            failed=self.failed,
            first_failure=self.first_failure,
            retried=self.retried,
            cut=self.cut,
            scripts=self.scripts,
            lost=self.lost,
            span_s=max(self.last_s - (self.first_s or 0.0), 0.0),
            prompt_tokens=self.prompt_tokens,
            hit_tokens=self.hit_tokens,
            reachable_tokens=self.reachable_tokens,
            refault_tokens=self.refault_tokens,
            recomputed_tokens=recomputed_tokens,
            output_tokens=self.output_tokens,
            preemptions=preemptions,
            imbalance=max(computed_tokens, default=0) / mean if mean else 0.0,
            ttft=self.ttft.spread(),
            token_time=self.token_time.spread(),
            end_to_end=self.end_to_end.spread(),
            held=self.held.spread(),
            conversation=self.conversation.spread(),
            phases=tuple(phase.outcome() for phase in self._phases),
            tenants={name: figures.outcome() for name, figures in sorted((self._tenants or {}).items())},
            ttft_curve=self.ttft.curve(),
            throughput=self.throughput.rates(),
            waiting=self.waiting.means(),
            cache_used=self.cache_used.means(),
            stages=tuple(self.stages),
        )
