"""One replica's place in the fleet: who it is, how it is, and what was promised to it.

Everything that changes about a replica changes here, in small synchronous steps, and the sums that pricing needs are
kept, not recounted: a `View` is built once after a change and shared by all placements until the next.

Load that no router promised (requests sent to the engine directly) is what a report shows above the highest sum of
promises in the last seconds: gauges lag by seconds, and requests that have just ended here must not count twice.
"""

from __future__ import annotations

from math import exp, inf

from msgspec import Struct

from kvroute.kv.chain import PrefixChain, blocks_in, hashes_of
from kvroute.routing.cost import REUSE_SHARE, View, Work, kv_tokens
from kvroute.routing.demand import Prefix, Promise
from kvroute.routing.lifetimes import ends_of, life_of, peak_with
from kvroute.routing.pinned import PinnedShare
from kvroute.routing.rates import ModelRates, Rates, Speed
from kvroute.routing.replica import Load, Replica

FAILURES_MAX = 3  # consecutive failed requests that take a replica out until a health check says that it is well
PEAK_WINDOW_S = 10.0  # gauges were seen to lag by 3 to 6 s
REPORT_LIFE_S = 15.0  # what an older report says about unexplained load is no longer believed
ADAPTERS_KEPT = 4  # LoRA adapters that an engine is taken to keep loaded; its --max-loras is not published
NOTHING = Promise()
FILL_WINDOW_S = 60.0  # over which the rate of new tokens is a mean
REUSE_STEP = 0.01
BUSY_MAX = 1.0
ENDS_LIFE_S = 0.5  # for which forecasts of when requests end are kept while nothing happens


class Booking(Struct, eq=False):
    """What one request holds on a replica, as booked, so that exactly that is given back."""

    sequences: int
    prefill_tokens: int
    kv_tokens: int  # without the prefix
    hit_tokens: int
    output_tokens: int  # expected, of all sequences
    prefix: Prefix | None = None  # that it holds together with others, if it is booked so
    left_out_tokens: int = 0  # of its hits, that are not in `kv_tokens` since others probably hold them as well
    spread: float = 1.0  # by which share of itself its answer may differ from what is expected
    chain: PrefixChain = PrefixChain(b"")
    block_size: int = 16  # of the chain


class Member:
    """A replica's mutable state. Only `Fleet` and `Lease` change it."""

    __slots__ = (
        "_before", "_bookings", "_computed_s", "_ends", "_live_hits", "_live_new", "_peak", "_peak_since_s",
        "_promise", "_rates",
        "_rates_version", "_stray", "_used_adapters", "_view", "adapters", "failures", "fill_rate", "is_draining",
        "is_healthy", "kv_tokens", "last_chosen", "load", "model_rates", "number", "others", "pinned", "prefill_rate",
        "prefill_tokens", "prefixes", "prompt_limits", "replica", "requests", "reuse_share", "running", "sequences",
        "speed", "spread", "stray_until_s", "watched",
    )  # fmt: skip

    def __init__(self, replica: Replica, number: int, model_rates: ModelRates) -> None:
        self.number = number  # order of joining
        self.last_chosen = 0  # the fleet's count of placements at the last one here; 0 = never
        self.is_healthy = True
        self.is_draining = False
        self.failures = 0  # in a row
        self.load = Load()
        self.requests = 0  # this router's, as are the next four
        self.sequences = 0
        self.running = 0  # sequences that have begun
        self.prefill_tokens = 0
        self.kv_tokens = 0
        self._bookings: dict[Booking, float | None] = {}  # and when their first bytes came
        self.spread = 1.0  # of answers, as of the last booking
        self._ends: tuple[float, list[tuple[float, float, int]]] | None = None  # of them, as of when
        self.prefixes: dict[
            int, list[int]
        ] = {}  # of each that is held in common, tokens behind its parent, and holders
        self.others = NOTHING  # the other routers' sum
        self.speed = Speed()
        self.pinned = PinnedShare()
        self.fill_rate = 0.0  # tokens a second that come into the cache, lately
        self.prefill_rate = 0.0  # of these, tokens of prompts
        self.reuse_share = REUSE_SHARE
        self._computed_s = -inf  # when the last report came
        self._live_hits = 0  # hit tokens of the requests that have begun
        self._live_new = 0  # tokens that these have computed and generated, roughly
        self.stray_until_s = inf
        self._stray = NOTHING  # load that no router explains
        self._peak = self._before = NOTHING  # highest sums of promises in this window and in the one before
        self._peak_since_s = -inf
        self._promise: Promise | None = NOTHING
        self._used_adapters: list[str] = []  # the last one at the end
        self.watched: list[tuple[set[int], int]] = []  # where its number is put after every change
        self.adopt(replica, model_rates)

    def adopt(self, replica: Replica, model_rates: ModelRates) -> None:
        """Take on what the replica says about itself; promises and health stay."""
        self.replica = replica
        usable = inf if replica.usable_tokens is None else replica.usable_tokens
        self.adapters = frozenset(card.name for card in replica.cards if card.parent is not None)
        self.prompt_limits = {card.name: min(card.max_model_len or inf, usable) for card in replica.cards}
        self.model_rates = model_rates
        self._rates: Rates = model_rates.rates_of(self.speed)
        self._rates_version = model_rates.version
        self._view: View | None = None
        self._unsee()

    @property
    def is_available(self) -> bool:
        """Whether new requests may go there."""
        return self.is_healthy and not self.is_draining and self.failures < FAILURES_MAX

    @property
    def promise(self) -> Promise:
        """What this router promised to it."""
        if self._promise is None:
            self._promise = Promise(self.requests, self.prefill_tokens, self.kv_tokens)
        return self._promise

    @property
    def rates(self) -> Rates:
        """How fast it is."""
        if self._rates_version != self.model_rates.version:
            self.refresh_rates()
        return self._rates

    def loads_adapter(self, model: str) -> bool:
        """Return whether a request for an adapter would have to wait for it to be loaded."""
        return model not in self._used_adapters

    def use_adapter(self, model: str) -> None:
        """Note that a request for a model was placed: if that is an adapter, it is loaded and others may go."""
        if model in self.adapters:
            kept = [name for name in self._used_adapters if name != model]
            self._used_adapters = [*kept, model][-ADAPTERS_KEPT:]

    def refresh_rates(self) -> None:
        """Recompute the rates after something was learnt."""
        self._rates = self.model_rates.rates_of(self.speed)
        self._rates_version = self.model_rates.version
        for changed, at in self.watched:
            changed.add(at)

    @property
    def view(self) -> View:
        """The replica as pricing sees it."""
        view = self._view
        if view is None:
            view = self._view = self._look()
        return view

    def _look(self) -> View:
        replica, load, others, stray = self.replica, self.load, self.others, self._stray
        computed = load.prompt_tokens - load.prefix_hits + load.generation_tokens
        return View(
            pending_prefill_tokens=self.prefill_tokens + others.prefill_tokens,
            running=self.running + others.requests + stray.requests,
            sequences=self.sequences + others.requests + stray.requests,
            kv_tokens=self.kv_tokens + others.kv_tokens + stray.kv_tokens,
            capacity_tokens=replica.capacity_tokens,
            max_num_seqs=replica.max_num_seqs,
            pinned_share=self.pinned.value,
            busy=min(self.prefill_rate * self.rates.token_s, BUSY_MAX),
            reuse_share=self.reuse_share,
            filled_tokens=min(max(computed, 0), replica.capacity_tokens or 0),
        )

    def asks(self, work: Work, prefix: Prefix | None) -> tuple[float, Prefix | None]:
        """Return the tokens that a request adds to what is promised, and the prefix if it is counted apart.

        A prefix that is known to be shared counts once, and all behind it in full, whether it is there already or is
        computed by this request; where nothing is known to be, hits count by the share that the engine's gauge shows.
        """
        found = work.hit_tokens - work.copy_tokens
        while prefix is not None and found < prefix.tokens and prefix.hash in self.prefixes:
            prefix = prefix.parent  # of this one it computes one more copy
        if prefix is None:
            return kv_tokens(self.view, work), None
        return found + work.new_tokens - prefix.tokens + self.missing(prefix), prefix

    def missing(self, prefix: Prefix | None) -> int:
        """Return the tokens of a prefix that no running request is known to hold."""
        tokens = 0
        while prefix is not None:
            if prefix.hash not in self.prefixes:
                tokens += part_of(prefix)
            prefix = prefix.parent
        return tokens

    def share(self, prefix: Prefix) -> bool:
        """Count a prefix apart that requests hold which came before it was known; return whether there is any."""
        found = False
        for booking in self._bookings if prefix.hash not in self.prefixes else ():
            blocks = prefix.tokens // booking.block_size
            if (
                booking.prefix is None
                and 0 < blocks <= blocks_in(booking.chain)
                and booking.kv_tokens + booking.left_out_tokens >= prefix.tokens
            ):
                if hashes_of(booking.chain)[blocks - 1] != prefix.hash:
                    continue
                change = booking.left_out_tokens - prefix.tokens
                booking.kv_tokens += change
                self.kv_tokens += change
                booking.prefix, booking.left_out_tokens, found = prefix, 0, True
                self._hold(prefix)
        if found:
            self._changed()
        return found

    def peak_with(self, work: Work, prefix: Prefix | None, now_s: float) -> float:
        """Return the most tokens that are held at a time if a request comes, by what is expected of all."""
        added, output_tokens = self.asks(work, prefix)[0], work.sequences * work.output_tokens
        new = life_of(added, output_tokens, work.sequences, 0.0, self.spread)
        common = sum(tokens for tokens, _ in self.prefixes.values())
        return common + self.others.kv_tokens + self._stray.kv_tokens + peak_with(self._ends_at(now_s), new)

    def _ends_at(self, now_s: float) -> list[tuple[float, float, int]]:
        """Return when the requests that run here will end."""
        if self._ends is None or now_s > self._ends[0] + ENDS_LIFE_S:
            step_s = self.rates.step_at(self.running, self.view.kv_tokens)
            lives = [
                life_of(
                    one.kv_tokens, one.output_tokens, one.sequences,
                    0.0 if began_s is None else (now_s - began_s) / step_s, one.spread,
                )
                for one, began_s in self._bookings.items()
            ]  # fmt: skip
            self._ends = (now_s, ends_of(lives))
        return self._ends[1]

    def _hold(self, prefix: Prefix | None) -> None:
        while prefix is not None:
            known = self.prefixes.get(prefix.hash)
            if known is None:
                part = part_of(prefix)
                self.prefixes[prefix.hash] = [part, 1]
                self.kv_tokens += part
            else:
                known[1] += 1
            prefix = prefix.parent

    def _let_go(self, prefix: Prefix | None) -> None:
        while prefix is not None:
            known = self.prefixes[prefix.hash]
            known[1] -= 1
            if not known[1]:
                del self.prefixes[prefix.hash]
                self.kv_tokens -= known[0]
            prefix = prefix.parent

    def book(self, booking: Booking) -> None:
        """Promise a request."""
        self._bookings[booking], self.spread = None, booking.spread
        self.requests += 1
        self.sequences += booking.sequences
        self.prefill_tokens += booking.prefill_tokens
        self.kv_tokens += booking.kv_tokens
        self._hold(booking.prefix)
        self._changed()
        self._raise_peak()

    def begin(self, booking: Booking, now_s: float | None = None) -> None:
        """Note that a request's prefill is over; None where that is only presumed."""
        self._bookings[booking] = now_s
        self.prefill_tokens -= booking.prefill_tokens
        self._run(booking, 1)

    def give_back(self, booking: Booking, *, has_begun: bool) -> None:
        """Take back what a request still held."""
        self._bookings.pop(booking, None)
        self.requests -= 1
        self.sequences -= booking.sequences
        self.kv_tokens -= booking.kv_tokens
        self._let_go(booking.prefix)
        if has_begun:
            self._run(booking, -1)
        else:
            self.prefill_tokens -= booking.prefill_tokens
        self._changed()

    def _run(self, booking: Booking, sign: int) -> None:
        self.running += sign * booking.sequences
        self._live_hits += sign * booking.hit_tokens
        self._live_new += sign * (booking.prefill_tokens + booking.output_tokens // 2)  # answers are half done
        self._changed()

    def set_others(self, promise: Promise) -> None:
        """Take in what the other routers promised."""
        if promise != self.others:
            self.others = promise
            self._unsee()
            self._raise_peak()

    def report(self, load: Load, now: float) -> None:
        """Take in what the engine's metrics said."""
        if now - self._peak_since_s > PEAK_WINDOW_S:
            self._before, self._peak, self._peak_since_s = self._peak, self._sum(), now
        self._learn_fill(load, now)
        self.load = load
        used_tokens = int(load.kv_used_fraction * (self.replica.capacity_tokens or 0))
        if self.kv_tokens:
            ours = self.kv_tokens / (self.kv_tokens + self.others.kv_tokens)
            self.pinned.learn(self._live_hits, self._live_new, used_tokens * ours)
        self._stray = Promise(
            max(load.running + load.waiting - max(self._peak.requests, self._before.requests), 0),
            0,
            max(used_tokens - max(self._peak.kv_tokens, self._before.kv_tokens), 0),
        )
        self.stray_until_s = now + REPORT_LIFE_S if self._stray != NOTHING else inf
        self._unsee()

    def _learn_fill(self, load: Load, now: float) -> None:
        spent_s, self._computed_s = now - self._computed_s, now
        prompts, answers = load.prompt_tokens - load.prefix_hits, load.generation_tokens
        prompts -= self.load.prompt_tokens - self.load.prefix_hits
        answers -= self.load.generation_tokens
        if spent_s > 0 and prompts >= 0 and answers >= 0:  # fewer: an engine that has restarted
            gain = 1.0 - exp(-spent_s / FILL_WINDOW_S)
            self.prefill_rate += gain * (prompts / spent_s - self.prefill_rate)
            self.fill_rate += gain * ((prompts + answers) / spent_s - self.fill_rate)

    @property
    def turnover_s(self) -> float:
        """How long what is not used again stays in the cache."""
        return (self.replica.capacity_tokens or 0) / self.fill_rate if self.fill_rate else inf

    def set_reuse(self, share: float) -> None:
        """Say what share of that will be asked for after it has gone."""
        if abs(share - self.reuse_share) > REUSE_STEP:
            self.reuse_share = share
            self._unsee()

    def forget_stray(self) -> None:
        """Stop believing a report that has become old."""
        self._stray, self.stray_until_s = NOTHING, inf
        self._unsee()

    def _changed(self) -> None:
        self._promise = None
        self._unsee()

    def _unsee(self) -> None:
        self._view = self._ends = None
        for changed, at in self.watched:
            changed.add(at)

    def _sum(self) -> Promise:
        """Sequences, as reports count them, and KV tokens that any router promised."""
        return Promise(self.sequences + self.others.requests, 0, self.kv_tokens + self.others.kv_tokens)

    def _raise_peak(self) -> None:
        here, peak = self._sum(), self._peak
        if here.requests > peak.requests or here.kv_tokens > peak.kv_tokens:
            self._peak = Promise(max(here.requests, peak.requests), 0, max(here.kv_tokens, peak.kv_tokens))


def part_of(prefix: Prefix) -> int:
    """Return the tokens of a prefix that its parent does not have."""
    return prefix.tokens - (prefix.parent.tokens if prefix.parent else 0)
