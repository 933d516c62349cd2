"""Who takes more than a fair share, and what room it has to leave for the others.

Whose turn it is is decided where requests are held (`waiting`). That is not enough for a tenant that asks now and then:
what another one has sent already is in the engines' caches and queues, and an engine lets nobody overtake. So a tenant
that was served more than GREEDY times its share of what all were, lately, leaves on every replica

    room    in the cache for one more request of the others, and for as much as they found no room for in the time
            of an answer; and among the conversations that live for one of theirs
    time    its prompts wait here, where they can be overtaken, while prompts ahead of them on a replica take longer to
            compute than a step there, or than TIME_SHARE of what a usual first token of the others takes

Where there is one tenant, or all take alike, nothing is left free. Not known here: replicas, and what is held.
"""

from __future__ import annotations

from collections import OrderedDict
from math import exp

WINDOW_S = 300.0  # for which a tenant counts after its last request, and over which what it took is forgotten
GREEDY = 1.5  # times an equal share
TIME_SHARE = 0.25
ROOM_SHARE = 0.5  # of a cache, that is left at most
ANSWER_MIN_S = 1.0
GAIN = 0.05  # of one more request of the others
TENANTS_MAX = 4096


class Reserve:
    """What is usual of the others' requests: means that forget."""

    __slots__ = ("answer_s", "first_token_s", "kv_tokens", "peak_tokens", "room_tokens")

    def __init__(self) -> None:
        self.room_tokens = 0.0  # to leave on each replica
        self.kv_tokens = 0.0  # that a request holds when it ends
        self.peak_tokens = 0.0  # that a conversation will hold when it holds most
        self.first_token_s = 0.0  # where nothing waits
        self.answer_s = 0.0

    def learn(self, kv_tokens: float, peak_tokens: float, first_token_s: float, answer_s: float) -> None:
        """Take in a request."""
        self.room_tokens = max(self.room_tokens, kv_tokens)
        gain = GAIN if self.kv_tokens else 1.0
        self.kv_tokens += gain * (kv_tokens - self.kv_tokens)
        self.peak_tokens += gain * (peak_tokens - self.peak_tokens)
        self.first_token_s += gain * (first_token_s - self.first_token_s)
        self.answer_s += gain * (answer_s - self.answer_s)


class Taken:
    """What one tenant took."""

    __slots__ = ("asked_s", "tokens")

    def __init__(self) -> None:
        self.asked_s = 0.0
        self.tokens = 0.0  # as of the moment from which all are counted


class Fairness:
    """Tenants that asked lately, and what they took. Bounded: the one that was silent for longest goes."""

    def __init__(self) -> None:
        self._others = Reserve()
        self._taken: OrderedDict[str, Taken] = OrderedDict()  # the one that asked last at the end
        self._total = 0.0
        self._since_s = 0.0  # what was taken a while later weighs more, instead of all before it weighing less
        self._now_s = self._faded_s = 0.0
        self._missed_tokens = 0.0  # for which the others found no room, lately
        self.replicas = 1  # among which room is to be left

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        self._now_s = now_s

    def ask(self, tenant: str) -> None:
        """Note that a tenant has a request."""
        taken = self._taken.get(tenant)
        if taken is None:
            taken = self._taken[tenant] = Taken()
        else:
            self._taken.move_to_end(tenant)
        taken.asked_s = self._now_s
        while len(self._taken) > TENANTS_MAX or self._first.asked_s < self._now_s - WINDOW_S:
            self._total -= self._taken.popitem(last=False)[1].tokens

    @property
    def has_several(self) -> bool:
        """Whether there is anybody to be fair to."""
        return len(self._taken) > 1

    @property
    def _first(self) -> Taken:
        return next(iter(self._taken.values()))

    def take(self, tenant: str, tokens: float) -> None:
        """Note that a tenant was served so many tokens."""
        taken = self._taken.get(tenant)
        if taken is None:
            return
        if self._now_s - self._since_s > 10 * WINDOW_S:
            self._begin_anew()
        weighted = tokens * exp((self._now_s - self._since_s) / WINDOW_S)
        taken.tokens += weighted
        self._total += weighted

    def _begin_anew(self) -> None:
        less = exp((self._since_s - self._now_s) / WINDOW_S)
        self._since_s, self._total = self._now_s, 0.0
        for taken in self._taken.values():
            taken.tokens *= less
            self._total += taken.tokens

    def is_greedy(self, tenant: str) -> bool:
        """Return whether a tenant took more than its share."""
        count = len(self._taken)
        if count < 2:
            return False
        taken = self._taken.get(tenant)
        return taken is not None and taken.tokens * count > GREEDY * max(self._total, 1.0)

    def learn(
        self, tenant: str, kv_tokens: float, *, peak_tokens: float, first_token_s: float, answer_s: float
    ) -> None:
        """Take in what a request asks that goes now."""
        if not self.is_greedy(tenant):
            self._others.learn(kv_tokens, peak_tokens, first_token_s, answer_s)

    def wait(self, tenant: str, kv_tokens: float) -> None:
        """Note that a request finds no room for so much."""
        if self.has_several and not self.is_greedy(tenant):
            self._fade()
            self._missed_tokens += kv_tokens

    def _fade(self) -> None:
        self._missed_tokens *= exp((self._faded_s - self._now_s) / max(self._others.answer_s, ANSWER_MIN_S))
        self._faded_s = self._now_s

    def reserve(self, tenant: str) -> Reserve | None:
        """Return what a tenant has to leave for the others; None = nothing."""
        if not self.is_greedy(tenant):
            return None
        self._fade()
        others = self._others
        others.room_tokens = max(others.kv_tokens, self._missed_tokens / self.replicas)
        return others
