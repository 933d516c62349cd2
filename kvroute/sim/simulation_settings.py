"""What a simulation is told: the engines, the routers, what they know and how late, and what happens to them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.rates import SEED, Rates
from kvroute.routing.router import TTFT_WEIGHT
from kvroute.sim.engine import StepTime
from kvroute.sim.replica import Limits, Offload

View = Literal["exact", "sent", "original"]
Kind = Literal["join", "leave", "crash"]


class EngineSettings(Struct, frozen=True, kw_only=True):
    """One engine; all of a fleet are alike."""

    kv_tokens: int  # that its cache holds
    block_size: int
    time: StepTime
    limits: Limits = Limits()
    model: str = "m"
    max_model_len: int | None = None  # None = what the cache holds
    offload: Offload | None = None  # CPU memory behind the cache

    def __post_init__(self) -> None:
        budget = self.limits.max_num_batched_tokens
        if not self.limits.enable_chunked_prefill and budget < self.context_tokens:  # it would wait for ever
            raise ConfigError(
                f"max_num_batched_tokens: {budget} tokens a step cannot hold a prompt of {self.context_tokens}, and "
                "without chunked prefill vLLM would not start"
            )

    @property
    def num_blocks(self) -> int:
        """Physical blocks, the null block included."""
        return max(self.kv_tokens // self.block_size, 1) + 1

    @property
    def context_tokens(self) -> int:
        """The longest prompt and answer together that can be served."""
        usable = (self.num_blocks - 1) * self.block_size
        return min(self.max_model_len or usable, usable)


class RouterSettings(Struct, frozen=True, kw_only=True):
    """The routers, and what they know.

    exact      what every engine's cache holds, and what is on its way there; events may be late or lost
    sent       what was sent to each replica, evicted as the engine would
    original   for a baseline, what its authors gave it; for kvroute, as `sent`
    """

    policy: str = "kvroute"
    count: int = 1
    is_shared: bool = True  # they share promises, and what was sent
    knowledge: View = "exact"
    ttft_weight: float = TTFT_WEIGHT
    admission: AdmissionSettings | None = AdmissionSettings()  # None = nothing is held; baselines never hold
    rates: Rates = SEED  # from which speeds are learnt
    event_lag_s: float = 0.0
    event_loss: float = 0.0  # share of event batches that never arrive
    ledger_lag_s: float = 0.005
    ledger_loss: float = 0.0  # share of ledger writes that never arrive; the next one repeats what they said
    metrics_every_s: float = 1.0
    metrics_lag_s: float = 0.0
    tells_output: bool = False  # clients state the length of their answers as max_tokens
    attempts_max: int = 3
    health_after_s: float = 1.0  # until a crashed engine is noticed by its health check
    wait_s: float = 10.0  # that a request waits for a replica when there is none

    def __post_init__(self) -> None:
        for name in ("event_loss", "ledger_loss"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name}: must be from 0 to 1, got {getattr(self, name)}")
        for name in ("event_lag_s", "ledger_lag_s", "metrics_lag_s", "health_after_s", "wait_s"):
            if not 0 <= getattr(self, name) < 1e6:
                raise ConfigError(f"{name}: must be from 0 to 1,000,000 seconds, got {getattr(self, name)}")
        if not 1 <= self.count <= 64:
            raise ConfigError(f"routers: must be from 1 to 64, got {self.count}")
        if not 0.001 <= self.metrics_every_s < 1e6:
            raise ConfigError(f"metrics_every_s: must be at least a millisecond, got {self.metrics_every_s}")


class Happening(Struct, frozen=True):
    """Something that befalls a replica."""

    at_s: float
    kind: Kind  # join: a new and empty one, leave: it gets no more requests and goes when it is idle
    replica: int  # its number


def happening_of(text: str) -> Happening:
    """Read SECONDS:join|leave|crash:NUMBER.

    Raises:
        ConfigError: it is written differently.
    """
    at, _, rest = text.partition(":")
    kind, _, number = rest.partition(":")
    try:
        found = Happening(float(at), kind, int(number))  # type: ignore[arg-type]
    except ValueError:
        found = None
    if found is None or kind not in ("join", "leave", "crash") or not 0 <= found.at_s < 1e9 or found.replica < 0:
        raise ConfigError(f"--event: {text!r} is not SECONDS:join|leave|crash:NUMBER, such as 60:crash:3")
    return found


def check_happenings(happenings: Sequence[Happening], replicas: int, most: int) -> None:
    """Refuse what could not happen: only who is there can leave or crash, and only who is not can join.

    Raises:
        ConfigError: which one, and why.
    """
    here = set(range(replicas))
    for one in sorted(happenings, key=lambda one: one.at_s):
        text = f"--event: {one.at_s:g}:{one.kind}:{one.replica}"
        if one.replica >= most:
            raise ConfigError(f"{text}: numbers of replicas are below {most}")
        if one.kind == "join" and one.replica in here:
            raise ConfigError(f"{text}: replica {one.replica} is there already; the first to join is {max(here) + 1}")
        if one.kind != "join" and one.replica not in here:
            raise ConfigError(f"{text}: there is no replica {one.replica} then; they count from 0")
        if one.kind == "join":
            here.add(one.replica)
        elif one.kind == "crash":
            here.remove(one.replica)
