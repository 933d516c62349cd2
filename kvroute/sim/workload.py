"""What clients send: conversations that begin at given times, each turn a prompt that names its blocks.

A workload is an iterator of `Script`s in the order of their starts. Under an open loop every request is a script of its
own and comes when it comes; under a closed loop a script is a conversation, whose next turn comes a think time after
the answer before it. Whoever plays it pulls one script ahead, so that memory is bounded by what is in flight.

A workload may have stages: a script with `stage_s` waits until all before it have ended, and if that is late, all that
follows is late by as much. An open loop knows no such waiting.

Prompts are chains, never tokens. A turn's chain goes on over its answer, since an engine caches that too.

    Story   a prompt that grows by named pieces: equal names in equal order are equal blocks
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import islice
from random import Random

from msgspec import Struct
from xxhash import xxh3_64_intdigest

from kvroute.errors import ConfigError
from kvroute.kv.chain import HASH_BYTES, PrefixChain

NAME_BITS = (1 << 63) - 1  # names of blocks leave room to count on from them within 64 bits
NOMINAL_FIXED_S, NOMINAL_PROMPT_TOKEN_S, NOMINAL_OUTPUT_TOKEN_S = 0.05, 1e-4, 0.02
TENANTS_MAX = 1_000
LIVE_MAX = 1_000_000  # conversations that an opened loop merges at once


class Turn(Struct, frozen=True):
    """One request."""

    chain: PrefixChain  # whole blocks of prompt and answer
    prompt_tokens: int
    output_tokens: int
    think_s: float = 0.0  # from the answer before it, in a closed loop
    new_tokens: int = 0  # of the prompt, as the client counts them; for nominal answer times only


class Script(Struct, frozen=True):
    """One conversation, or one request of an open loop."""

    start_s: float
    turns: Iterator[Turn]
    tenant: str = "default"
    stage_s: float | None = None  # it opens a stage that begins at this time, or when all before it has ended if later


Workload = Iterator[Script]


def name_of(*parts: str | int, seed: int = 0) -> int:
    """Return a number for a thing, from which blocks can be counted; length-prefixed, so no two are confused."""
    data = b"".join(b"%d:%b" % (len(part), part) for part in (str(one).encode() for one in parts))
    return xxh3_64_intdigest(data, seed) & NAME_BITS


def names_from(first: int, last: int, step: int) -> bytes:
    """Return the names first, first + step, ... up to `last`, as bytes of a chain."""
    return array("Q", range(first, last + 1, step)).tobytes()


class Story:
    """A prompt that grows. A block is named by the piece that it ends in, and by all that came before that piece."""

    __slots__ = ("_state", "block_size", "chain", "tokens")

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.chain = b""
        self.tokens = 0
        self._state = 0

    def tell(self, key: str, tokens: int) -> Story:
        """Append `tokens` tokens of the text called `key`, and return the story itself."""
        size, start = self.block_size, self.tokens
        base = name_of(key, seed=self._state)
        first = (start // size + 1) * size - start  # tokens of this piece up to the end of its first whole block
        self.chain += names_from(base + first, base + tokens, size)
        self.tokens = start + tokens
        self._state = xxh3_64_intdigest(tokens.to_bytes(8, "little"), base)
        return self

    def fork(self) -> Story:
        """Return a story that begins like this one."""
        other = Story(self.block_size)
        other.chain, other.tokens, other._state = self.chain, self.tokens, self._state
        return other

    def ask(self, answer: str, output_tokens: int, think_s: float = 0.0, new_tokens: int = 0) -> Turn:
        """Return the turn whose prompt is the story so far, and go on with its answer."""
        prompt_tokens = self.tokens
        self.tell(answer, output_tokens)
        return Turn(PrefixChain(self.chain), prompt_tokens, output_tokens, think_s, new_tokens)


def prompt_chain(turn: Turn, block_size: int) -> PrefixChain:
    """Return the whole blocks of a turn's prompt."""
    return PrefixChain(turn.chain[: turn.prompt_tokens // block_size * HASH_BYTES])


def cached_chain(turn: Turn, output_tokens: int, block_size: int) -> PrefixChain:
    """Return the whole blocks that a turn leaves in a cache: the last token of an answer is sampled, never computed."""
    computed = turn.prompt_tokens + output_tokens - 1
    return PrefixChain(turn.chain[: computed // block_size * HASH_BYTES])


def padded(chain: bytes, tokens: int, block_size: int, name: int) -> PrefixChain:
    """Name the blocks of `tokens` tokens that a chain has no names for: nobody else will ever ask for them."""
    missing = tokens // block_size - len(chain) // HASH_BYTES
    if missing <= 0:
        return PrefixChain(chain[: tokens // block_size * HASH_BYTES])
    return PrefixChain(chain + names_from(name + 1, name + missing, 1))


def nominal_s(turn: Turn) -> float:
    """Return an answer's time on an engine that nobody else uses, for timestamps of an open loop."""
    new_tokens = turn.new_tokens or turn.prompt_tokens
    return NOMINAL_FIXED_S + NOMINAL_PROMPT_TOKEN_S * new_tokens + NOMINAL_OUTPUT_TOKEN_S * turn.output_tokens


def opened(workload: Workload, service: Callable[[Turn], float] = nominal_s) -> Workload:
    """Turn conversations into an open loop: turns come after think times and `service`, stages at their times."""
    live: list[tuple[float, int, Iterator[Turn], Turn, str]] = []
    number = 0
    coming = next(workload, None)
    while coming is not None or live:
        if coming is not None and (not live or coming.start_s <= live[0][0]):
            turn = next(coming.turns, None)
            if turn is not None:
                number += 1
                heappush(live, (coming.start_s, number, coming.turns, turn, coming.tenant))
            coming = next(workload, None)
            if len(live) > LIVE_MAX:
                raise ConfigError(f"more than {LIVE_MAX} conversations are open at once: lower the rate")
            continue
        at_s, _, turns, turn, tenant = heappop(live)
        yield Script(at_s, iter((turn,)), tenant)
        later = next(turns, None)
        if later is not None:
            number += 1
            heappush(live, (at_s + service(turn) + later.think_s, number, turns, later, tenant))


def jittered(workload: Workload, width_s: float, rng: Random) -> Workload:
    """Spread starts that were stamped in steps of `width_s` over the step; the order may change within it."""
    waiting: list[tuple[float, int, Script]] = []
    for number, script in enumerate(workload):
        while waiting and waiting[0][0] <= script.start_s:
            yield _moved(*heappop(waiting))
        heappush(waiting, (script.start_s + rng.random() * width_s, number, script))
    while waiting:
        yield _moved(*heappop(waiting))


def _moved(start_s: float, number: int, script: Script) -> Script:
    return Script(start_s, script.turns, script.tenant)


def alone(workload: Workload, block_size: int) -> Workload:
    """Play requests one at a time, each when the one before it has ended: what is left is who finds what in caches.

    Answers are cut to one token, so that only what prompts leave behind is found.
    """
    turns = (turn for script in workload for turn in script.turns)
    yield Script(0.0, (Turn(prompt_chain(turn, block_size), turn.prompt_tokens, 1) for turn in turns))


def paced(workload: Workload, rate: float) -> Workload:
    """Make everything start `rate` times as densely."""
    if not rate > 0:
        raise ConfigError(f"--rate: must be greater than 0, got {rate}", param="rate")
    for script in workload:
        stage_s = None if script.stage_s is None else script.stage_s / rate
        yield Script(script.start_s / rate, script.turns, script.tenant, stage_s)


def limited(workload: Workload, requests: int | None = None, scripts: int | None = None) -> Workload:
    """Stop after so many requests, or so many scripts. A conversation under way ends where the requests do."""
    left = [requests if requests is not None else -1]
    for script in islice(workload, scripts):
        if not left[0]:
            return
        yield Script(script.start_s, _counted(script.turns, left), script.tenant, script.stage_s)


def _counted(turns: Iterable[Turn], left: list[int]) -> Iterator[Turn]:
    if left[0]:
        for turn in turns:
            left[0] -= 1
            yield turn
            if not left[0]:
                return


class Think(Struct, frozen=True):
    """How long a client waits before its next turn."""

    kind: str = "recorded"  # recorded, fixed, exponential
    mean_s: float = 0.0

    def applied(self, workload: Workload, rng: Random) -> Workload:
        """Replace the think times of a workload."""
        if self.kind == "recorded":
            return workload
        seeds = Random(rng.getrandbits(64))
        return (Script(one.start_s, self._thinking(one.turns, seeds), one.tenant, one.stage_s) for one in workload)

    def _thinking(self, turns: Iterator[Turn], seeds: Random) -> Iterator[Turn]:
        own = Random(seeds.getrandbits(64))  # so that a policy cannot change how long anybody thinks
        return self._drawn(turns, own)

    def _drawn(self, turns: Iterator[Turn], rng: Random) -> Iterator[Turn]:
        for turn in turns:
            think_s = self.mean_s if self.kind == "fixed" or not self.mean_s else rng.expovariate(1 / self.mean_s)
            yield Turn(turn.chain, turn.prompt_tokens, turn.output_tokens, think_s, turn.new_tokens)


def think_of(text: str) -> Think:
    """Read a think time: none, recorded, SECONDS, or exp:SECONDS.

    Raises:
        ConfigError: it is none of these.
    """
    if text in ("none", "recorded"):
        return Think("fixed" if text == "none" else text)
    kind, _, value = text.rpartition(":")
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if kind not in ("", "exp") or not 0 <= seconds < 1e6:
        raise ConfigError(f"--think: {text!r} is none of none, recorded, SECONDS, exp:SECONDS", param="think")
    return Think("exponential" if kind else "fixed", seconds)


def restarted(workload: Workload, starts_s: float, rng: Random) -> Workload:
    """Let scripts begin as a Poisson process of `starts_s` a second, in their order."""
    if not starts_s > 0:
        raise ConfigError(f"--starts: must be greater than 0, got {starts_s}", param="starts")
    at_s = 0.0
    for script in workload:
        at_s += rng.expovariate(starts_s)
        yield Script(at_s, script.turns, script.tenant)


def tenanted(workload: Workload, shares: Sequence[float], rng: Random, only: str | None = None) -> Workload:
    """Give every conversation to one of the tenants "1", "2", ... by chance, with these shares.

    Where `only` one of them is played, its conversations are the same as among the others', at the same times.
    """
    names = [str(number) for number in range(1, len(shares) + 1)]
    stage_s: float | None = None  # of a stage whose first conversation is left out
    for script in workload:
        (tenant,) = rng.choices(names, shares)
        stage_s = script.stage_s if script.stage_s is not None else stage_s
        if only is None or tenant == only:
            yield Script(script.start_s, script.turns, tenant, stage_s)
            stage_s = None


def shares_of(text: str) -> tuple[float, ...]:
    """Read tenants' shares: 9,1.

    Raises:
        ConfigError: they are written differently.
    """
    try:
        shares = tuple(float(part) for part in text.split(","))
    except ValueError:
        shares = ()
    if not 1 <= len(shares) <= TENANTS_MAX or not all(0 < share < 1e9 for share in shares):
        raise ConfigError(f"--tenants: {text!r} is not SHARE,SHARE,... at most {TENANTS_MAX}", param="tenants")
    return shares
