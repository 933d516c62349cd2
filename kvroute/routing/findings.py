"""What an examination of a pool saw, and the words in which its verdicts are given.

Values only: `diagnosis` judges one replica, `pool_diagnosis` what they have in common. Nothing here knows how a fact
was learnt.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct

from kvroute.routing.replica import ModelCard

Level = Literal[
    "ok", "note", "warn", "fail"
]  # fail: routing is blind there; warn: it costs something; note: good to know


class Finding(Struct, frozen=True):
    """One line: what was looked at, what is so, what that costs, and what mends it."""

    check: str
    level: Level
    says: str
    costs: str = ""
    remedy: str = ""


def is_blind(findings: Iterable[Finding]) -> bool:
    """Return whether routing would not know what it does."""
    return any(finding.level == "fail" for finding in findings)


class EngineFacts(Struct, frozen=True):
    """What one engine's metrics say about its cache."""

    engine: int = 0  # data-parallel rank
    block_size: int | None = None  # tokens
    capacity_tokens: int | None = None
    prefix_caching: bool | None = None


class TokensFacts(Struct, frozen=True):
    """One prompt as our files tokenise it, beside what the replica's /tokenize says."""

    prompt: str  # its kind, for people
    ours: int | None = None  # tokens; None where it was not tokenised here
    theirs: int | None = None  # tokens; None where the replica did not say
    differs_at: int | None = None  # position of the first token that differs
    why: str = ""  # why one of both is missing


class ProbeFacts(Struct, frozen=True):
    """A prompt that nobody sent before, sent twice."""

    engine: int = 0
    trouble: str = ""  # why it could not be sent
    expected_tokens: int | None = None  # length of the prompt, None where nothing here can tokenise it
    prompt_tokens: int = 0  # its length as the engine counted it
    predicted_tokens: int = 0  # what the second one can take from the cache
    cached_tokens: tuple[int | None, int | None] = (None, None)  # as the engine reported for each; None: not reported
    counted_hits: int | None = None  # by how much the engine's hit counter rose with the second
    took_s: tuple[float, float] = (0.0, 0.0)


class EventsFacts(Struct, frozen=True):
    """The KV event stream of one engine."""

    engine: int = 0
    published: bool | None = None  # None: the replica does not say
    endpoint: str = ""  # where we listened, "" where we did not
    trouble: str = ""  # why we could not
    heard: int | None = None  # batches during the hash probe
    block_sizes: tuple[int, ...] = ()  # of the blocks in them
    replay_endpoint: str = ""
    is_replayed: bool | None = None  # the newest batch was given once more; None: it was not asked for


class ReplicaFacts(Struct, frozen=True, kw_only=True):
    """Everything that was seen of one URL."""

    url: str
    ailment: str = ""  # why /health does not say 200
    latency_s: float = 0.0  # the quickest answer of several
    clock_ahead_s: float | None = None  # its clock minus ours
    up_s: float | None = None  # since its start, by our clock
    has_key: bool = False  # we sent an API key
    version: str | None = None
    cards: tuple[ModelCard, ...] = ()
    cards_trouble: str = ""
    is_refused: bool = False  # it wants another API key
    metrics_trouble: str = ""
    engines: tuple[EngineFacts, ...] = ()
    model: str | None = None  # the one that was examined
    tokens_by: str = ""  # local, approximate: what our files are good for
    tokens_why: str = ""
    tokens: tuple[TokensFacts, ...] = ()
    probes: tuple[ProbeFacts, ...] = ()
    events: tuple[EventsFacts, ...] = ()


class StoreFacts(Struct, frozen=True, kw_only=True):
    """What was seen of the shared Redis."""

    url: str  # without secrets
    trouble: str = ""  # why it cannot be used
    version: str = ""  # of Redis' protocol, which Valkey reports as well
    policy: str = ""  # maxmemory-policy
    maxmemory_bytes: int = 0  # 0: no limit
    used_bytes: int = 0
    ping_s: float = 0.0  # median
    slowest_ping_s: float = 0.0
    deadline_s: float = 0.0  # of a lookup, as configured
