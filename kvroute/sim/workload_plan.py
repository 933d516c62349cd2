"""From what a user asks for to a workload: which requests, how fast, in an open or a closed loop.

open    every request comes at its time, whatever happens to those before it
closed  a conversation's next request comes a think time after the answer before it
alone   one request at a time, in the order of an open loop: hit shares of a policy, time ignored
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from random import Random
from typing import Literal

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sim.workload import Think, Workload, alone, jittered, limited, opened, paced
from kvroute.sim.workload_profiles import generated
from kvroute.sim.workload_text import conversations
from kvroute.sim.workload_trace import Trace, even_starts

Loop = Literal["auto", "open", "closed", "alone"]
STARTS_S = 1.0  # conversations a second, of what has no times of its own


class Pace(Struct, frozen=True, kw_only=True):
    """How a workload is played."""

    loop: Loop = "auto"  # open where there are times and neither think nor starts are given, else closed
    rate: float = 1.0  # times as densely as recorded
    starts_s: float | None = None  # conversations a second, as a Poisson process, in a shuffled order
    think: Think | None = None  # None = as recorded
    think_cap_s: float = 300.0  # recorded pauses are cut to this
    jitter_s: float = 0.0  # over which requests stamped together are spread
    limit: int | None = None  # requests
    sessions: int | None = None  # conversations

    @property
    def is_closed(self) -> bool:
        """Whether the loop is closed, for what has times of its own."""
        return self.loop == "closed" or (self.loop == "auto" and (self.think is not None or self.starts_s is not None))


def of_trace(trace: Trace, pace: Pace, seed: int, *, has_times: bool) -> Workload:
    """Play a trace.

    Raises:
        ConfigError: an open loop is asked for, and there are no timestamps.
    """
    if not pace.is_closed and has_times:
        work = trace.by_timestamp()
        if pace.loop == "alone":
            return alone(limited(work, pace.limit, pace.sessions), trace.naming.block_size)
        if pace.jitter_s:
            work = jittered(work, pace.jitter_s, rng_of(seed, "jitter"))
        return limited(paced(work, pace.rate), pace.limit, pace.sessions)
    starts = None
    if pace.starts_s is not None or not has_times:
        starts = even_starts(pace.starts_s or STARTS_S, rng_of(seed, "starts"))
    work = trace.by_session(starts, pace.think_cap_s, None if starts is None else seed)
    return looped(work, pace, trace.naming.block_size, seed)


def of_texts(lines: Callable[[], Iterator[bytes]], block_size: int, pace: Pace, seed: int) -> Workload:
    """Play recorded conversations."""
    starts = even_starts(pace.starts_s or STARTS_S, rng_of(seed, "starts"))
    return looped(conversations(lines(), starts, block_size), pace, block_size, seed)


def of_profile(name: str, parameters: dict[str, str], block_size: int, pace: Pace, seed: int) -> Workload:
    """Play what a generator makes."""
    work = generated(name, parameters, block_size, seed)
    if pace.starts_s is not None:
        raise ConfigError(f"--starts: {name} has a rate of its own: set {name}:rate=..., or --rate", param="starts")
    return looped(work, pace, block_size, seed)


def looped(work: Workload, pace: Pace, block_size: int, seed: int) -> Workload:
    """Play conversations in a closed loop, or in an open one with nominal answer times."""
    if pace.think is not None:
        work = pace.think.applied(work, rng_of(seed, "think"))
    if pace.loop == "open":
        return limited(paced(opened(limited(work, None, pace.sessions)), pace.rate), pace.limit)
    if pace.loop == "alone":
        return alone(limited(opened(limited(work, None, pace.sessions)), pace.limit), block_size)
    return limited(paced(work, pace.rate), pace.limit, pace.sessions)


def rng_of(seed: int, purpose: str) -> Random:
    """Return a stream of chance of its own for every purpose, so that one option does not change another's draws."""
    return Random(f"{purpose} {seed}")


def profile_of(text: str) -> tuple[str, dict[str, str]]:
    """Read NAME or NAME:KEY=VALUE,... ; values may hold commas if another KEY= does not follow.

    Raises:
        ConfigError: a part is not KEY=VALUE.
    """
    name, _, rest = text.partition(":")
    parameters: dict[str, str] = {}
    last = None
    for part in rest.split(",") if rest else ():
        key, mark, value = part.partition("=")
        if mark and key:
            last = key.strip().replace("-", "_")
            parameters[last] = value.strip()
        elif last is not None:
            parameters[last] += "," + part
        else:
            raise ConfigError(f"{text!r} is not NAME:KEY=VALUE,...")
    return name, parameters
