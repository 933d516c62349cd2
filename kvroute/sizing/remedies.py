"""How close a running engine is to its cache's limit, and what each of the four remedies would buy.

    shorter context            fewer tokens a conversation: as many more conversations
    FP8 cache                  half the bytes a token (less where recurrent states take part)
    more memory                tokens in proportion; with one more equal engine, twice
    fewer concurrent requests  the ones that fit stop being thrown out and computed again

Gauges stand still while an engine is idle and count running requests only, so an idle engine has nothing to say.
"""

from __future__ import annotations

from math import ceil, floor

from msgspec import Struct

from kvroute.sizing.capacity import CACHE_DTYPE_BYTES, kv_bytes
from kvroute.sizing.model import Model

FULL = 0.9  # share of the cache from which an engine is close to its limit
GB = 10**9


class Usage(Struct, frozen=True, kw_only=True):
    """What a running engine reported."""

    capacity_tokens: int
    used_fraction: float  # of running requests
    running: int
    waiting: int
    preemptions: int  # since the engine started
    cache_dtype: str = "auto"
    max_model_len: int | None = None


class Remedy(Struct, frozen=True):
    """One way out. `conversations` is how many of the present length then fit; None where that cannot be told."""

    name: str
    conversations: int | None
    what: str


class Headroom(Struct, frozen=True, kw_only=True):
    """The state of an engine's cache."""

    state: str  # one sentence
    used_tokens: int
    mean_tokens: int | None  # of a running conversation
    fitting: int | None  # conversations of that length that the cache holds
    close: bool
    remedies: tuple[Remedy, ...]


def headroom(usage: Usage, model: Model | None = None) -> Headroom:
    """Say how close an engine is to its limit. The model, where known, turns tokens into bytes."""
    used = round(usage.capacity_tokens * usage.used_fraction)
    mean = ceil(used / usage.running) if usage.running and used else None
    fitting = usage.capacity_tokens // mean if mean else None
    close = (
        usage.used_fraction >= FULL or (usage.waiting > 0 and usage.used_fraction >= FULL / 2) or usage.preemptions > 0
    )
    return Headroom(
        state=_state(usage, used),
        used_tokens=used,
        mean_tokens=mean,
        fitting=fitting,
        close=close,
        remedies=_remedies(usage, mean, fitting, model),
    )


def _state(usage: Usage, used: int) -> str:
    thrown = f", {usage.preemptions:,} preemptions since it started" if usage.preemptions else ""
    if not usage.running and not usage.waiting:
        return f"idle: no request holds cache now, so usage says nothing{thrown}"
    share = f"{usage.used_fraction:.0%} of {usage.capacity_tokens:,} tokens held by {usage.running} running requests"
    if usage.used_fraction >= FULL and usage.preemptions:
        return f"full: {share}, {usage.waiting} waiting{thrown}: more tokens are held than fit"
    if usage.used_fraction >= FULL:
        return f"nearly full: {share}, {usage.waiting} waiting"
    return f"room for {usage.capacity_tokens - used:,} tokens: {share}, {usage.waiting} waiting{thrown}"


def _remedies(usage: Usage, mean: int | None, fitting: int | None, model: Model | None) -> tuple[Remedy, ...]:
    tokens = mean or usage.max_model_len or 8_000
    now = fitting if fitting is not None else usage.capacity_tokens // tokens
    half = max(1, tokens // 2)
    then = usage.capacity_tokens // half
    shorter = Remedy(
        "shorter context",
        then,
        f"conversations of {half:,} instead of {tokens:,} tokens: {then:,} fit instead of {now:,}",
    )
    return (
        shorter,
        _eight_bit(usage, tokens, now, model),
        _memory(usage, tokens, now, model),
        _fewer(usage, tokens, now),
    )


def _eight_bit(usage: Usage, tokens: int, now: int, model: Model | None) -> Remedy:
    if usage.cache_dtype.startswith(("fp8", "int8", "nvfp4")):
        return Remedy("FP8 cache", now, f"already {usage.cache_dtype}: nothing more to gain")
    factor = kv_bytes(model, tokens) / kv_bytes(model, tokens, 1) if model else 2.0
    then = floor(now * factor) if now else floor(usage.capacity_tokens * factor / tokens)
    return Remedy(
        "FP8 cache",
        then,
        f"--kv-cache-dtype fp8: {factor:.1f} times the tokens, {then:,} conversations fit instead of {now:,}",
    )


def _memory(usage: Usage, tokens: int, now: int, model: Model | None) -> Remedy:
    if model is None:
        return Remedy(
            "more memory", 2 * now, f"a second engine beside it doubles the tokens: {2 * now:,} conversations"
        )
    size = CACHE_DTYPE_BYTES.get(usage.cache_dtype, model.element_bytes)
    more = 10 * GB // max(1, kv_bytes(model, tokens, size))
    return Remedy(
        "more memory", now + more, f"each further 10 GB of cache holds {more:,} more conversations of {tokens:,} tokens"
    )


def _fewer(usage: Usage, tokens: int, now: int) -> Remedy:
    running = usage.running + usage.waiting
    if running <= now:
        return Remedy(
            "fewer concurrent requests", now, f"{running} at once fit; --max-num-seqs {max(1, now)} keeps it so"
        )
    return Remedy(
        "fewer concurrent requests",
        now,
        f"--max-num-seqs {max(1, now)} instead of {running} at once: none is preempted, the others wait their turn",
    )
