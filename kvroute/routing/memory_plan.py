"""For how long a pausing conversation's cache should be kept, by what would serve the most turns a second.

Keeping it saves computing the history again when the conversation goes on; giving the room to another one lets one more
run meanwhile. Which is better depends on how long conversations pause, and no fixed time is right: agents without
pauses need next to none, readers who pause for minutes are not worth waiting for.

For a replica that keeps caches for `memory_s` after an answer, X turns a second, n of them running at a time:

    room      n + X x E[min(pause, memory_s)] = conversations that fit
    time      X = n / (answer x step(n) + n x prefill)     running turns share the engine: prefills stop the others
    prefill   hit where the pause was within memory_s, else all of the conversation's own history

Nothing has to be kept where the engine's own eviction copes: `population` is how many conversations could be live if
nobody was held and the engines, which prefill for BUSY of the time, kept what was used last. Up to that number holding
would only let people wait.

The first equation is Little's law over the time that a turn's cache is held, the prefill's mixture is Che's
approximation of LRU. X is computed for the end of each step of the learnt pauses, and for not keeping anything.

Not known here: which conversations there are. Everything is a mean.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from kvroute.routing.rates import Rates

ROUNDS = 40  # of bisection: far below a thousandth of a sequence
WORTH = 1.02  # a longer memory has to serve so much more than a shorter one
LONGEST_S = 600.0  # nobody's place is kept for longer
NEEDED = 1.25  # and any so much more than none: means promise more than a pool of few conversations keeps


BUSY = 0.7  # of the time an engine prefills, up to which first tokens come soon enough


class Turns(Struct, frozen=True):
    """What turns of conversations are like, in the mean."""

    hit_tokens: float  # compute of a prefill where the history is cached, in tokens of equal work
    miss_tokens: float  # compute where it is not
    output_tokens: float
    kv_tokens: float  # in the cache of one running conversation
    ends: float  # chance that there is no further turn: its cache is kept in vain
    pauses: Sequence[tuple[float, float]]  # (longest of a step, share of those that go on), shortest first


class Plan(Struct, frozen=True):
    """The best time to keep caches, and what it would serve."""

    memory_s: float
    turns_s: float  # a second, of one replica that is never idle


def best_plan(turns: Turns, room: float, rates: Rates) -> Plan:
    """Return the best plan for a replica in which so many conversations fit."""
    best = none = Plan(0.0, turns_served(turns, room, rates, 0.0, 0.0, 0.0))
    within, held = 0.0, 0.0
    shorter_s = 0.0
    for end_s, share in turns.pauses:
        if end_s > LONGEST_S:
            break
        held += share * (shorter_s + end_s) / 2
        within += share
        goes_on = 1.0 - turns.ends
        kept_s = goes_on * (held + (1.0 - within) * end_s) + turns.ends * end_s
        served = turns_served(turns, room, rates, end_s, within, kept_s)
        if served > WORTH * best.turns_s:
            best = Plan(end_s, served)
        shorter_s = end_s
    return best if best.turns_s > NEEDED * none.turns_s else none


def population(turns: Turns, room: float, rates: Rates, ttft_weight: float) -> float:
    """Return how many conversations a replica in which `room` fit can serve without anybody being held.

    Prefills of what was evicted make first tokens wait for each other, and answers that run for all of them: how busy
    with them an engine may be depends on how much only first tokens count.
    """
    busy_max = BUSY * ttft_weight
    if not busy_max:
        return 0.0
    pause_s, shorter_s = 0.0, 0.0
    for end_s, share in turns.pauses:
        pause_s += share * (shorter_s + end_s) / 2
        shorter_s = end_s
    most = cycles(turns, room, rates, busy_max, pause_s, 0.0, 0.0)
    within, held, shorter_s = 0.0, 0.0, 0.0
    for end_s, share in turns.pauses:
        held += share * (shorter_s + end_s) / 2
        within += share
        kept_s = (1.0 - turns.ends) * (held + (1.0 - within) * end_s) + turns.ends * end_s
        most = max(most, cycles(turns, room, rates, busy_max, pause_s, within, kept_s))
        shorter_s = end_s
    return most


def cycles(
    turns: Turns, room: float, rates: Rates, busy_max: float, pause_s: float, within: float, kept_s: float
) -> float:
    """Return the conversations that go round where the least recently used is evicted after `kept_s` in the mean."""
    prefill_s = rates.fixed_s + (within * turns.hit_tokens + (1.0 - within) * turns.miss_tokens) * rates.token_s
    alone_s = turns.output_tokens * rates.step_s
    growth = alone_s * rates.growth_at(1, turns.kv_tokens)

    def running(served: float) -> float:
        busy = min(served * prefill_s, busy_max)
        return served * (prefill_s / (1.0 - busy) + alone_s) / max(1.0 - served * growth, 1e-9)

    low, high = 0.0, busy_max / prefill_s
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if running(middle) + middle * kept_s > room:
            high = middle
        else:
            low = middle
    return low * pause_s + running(low)


def turns_served(turns: Turns, room: float, rates: Rates, memory_s: float, within: float, kept_s: float) -> float:
    """Return the turns a second where caches are kept for `memory_s`: `within` of the pauses, `kept_s` in the mean."""
    compute = within * turns.hit_tokens + (1.0 - within) * turns.miss_tokens
    prefill_s = rates.fixed_s + compute * rates.token_s

    def served(running: float) -> float:
        answer_s = turns.output_tokens * rates.step_at(running, running * turns.kv_tokens)
        return running / (answer_s + running * prefill_s)

    low, high = 0.0, room
    if room + served(room) * kept_s <= room:
        return served(room)
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if middle + served(middle) * kept_s > room:
            high = middle
        else:
            low = middle
    return served(low)
