"""Facts about several replicas, or about the store that routers share -> findings that no single replica shows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence

from kvroute.routing.findings import Finding, ReplicaFacts, StoreFacts

OLDEST_REDIS = (6, 2)


def judge_pool(pool: Sequence[ReplicaFacts]) -> list[Finding]:
    """Return where replicas of the same model differ in what ought to be equal."""
    well = [facts for facts in pool if not facts.ailment and facts.cards]
    models = {model: [one for one in well if one.model == model] for model in dict.fromkeys(one.model for one in well)}
    found = [finding for model, those in models.items() for finding in _judge_model(model or "?", those)]
    if len(models) > 1:
        names = ", ".join(f"{model} on {len(those)}" for model, those in models.items())
        found.append(Finding("models", "note", f"several are served: {names}; each is routed among its own replicas"))
    return found


def _judge_model(model: str, those: list[ReplicaFacts]) -> Iterator[Finding]:
    blocks = _groups(those, lambda one: one.engines[0].block_size if one.engines else None)
    if len(blocks) > 1:
        yield Finding(
            "block size",
            "warn",
            f"replicas of {model} differ: {_words(blocks, 'tokens')}",
            "kvroute hashes with the first one's; what the others hold cannot be predicted",
            "the same --block-size, attention backend and vLLM version on all of them",
        )
    contexts = _groups(those, _context)
    if len(contexts) > 1:
        yield Finding(
            "context",
            "warn",
            f"replicas of {model} differ: {_words(contexts, 'tokens')}",
            "long requests fit on some of them only, and crowd there",
            "the same --max-model-len on all of them",
        )
    roots = _groups(those, lambda one: next((card.root for card in one.cards if card.name == one.model), None))
    if len(roots) > 1:
        yield Finding(
            "model files",
            "warn",
            f"replicas of {model} were loaded from different places: {_words(roots, '')}",
            "where weights or templates differ, answers do, and so do the tokens of prompts",
            "the same model and --revision on all of them, or another --served-model-name",
        )
    versions = _groups(those, lambda one: one.version)
    if len(versions) > 1:
        yield Finding(
            "version",
            "note",
            f"replicas of {model} differ: {_words(versions, '')}",
            "renderings of chats may differ between releases; the token checks above say whether they do",
            "one vLLM version for all of them, after a rolling update",
        )


def _context(facts: ReplicaFacts) -> int | None:
    return next((card.max_model_len for card in facts.cards if card.name == facts.model), None)


def _groups(
    those: list[ReplicaFacts], of: Callable[[ReplicaFacts], Hashable | None]
) -> dict[Hashable, list[ReplicaFacts]]:
    """Group by a value; replicas that do not tell it are left out."""
    groups: dict[Hashable, list[ReplicaFacts]] = {}
    for one in those:
        if (value := of(one)) is not None:
            groups.setdefault(value, []).append(one)
    return groups


def _words(groups: dict[Hashable, list[ReplicaFacts]], unit: str) -> str:
    """Name the most common value's count, and the URLs of the others."""
    ordered = sorted(groups.items(), key=lambda item: -len(item[1]))
    parts = []
    for number, (value, those) in enumerate(ordered):
        text = f"{value:,}" if isinstance(value, int) else str(value)
        where = f"on {len(those)}" if number == 0 and len(those) > 1 else "on " + ", ".join(o.url for o in those[:3])
        parts.append(f"{text} {unit}".rstrip() + f" {where}" + (" ..." if number and len(those) > 3 else ""))
    return "; ".join(parts)


def judge_store(facts: StoreFacts) -> list[Finding]:
    """Return what is to be said about the Redis that routers share."""
    if facts.trouble:
        return [
            Finding(
                "redis",
                "fail",
                f"{facts.url} cannot be used: {facts.trouble}",
                "each router knows only what it placed itself, and several of them crowd the same replica",
                "check the URL, the password and the firewall: redis-cli -u URL ping",
            )
        ]
    return [*_store_version(facts), *_store_policy(facts), *_store_latency(facts)]


def _store_version(facts: StoreFacts) -> Iterator[Finding]:
    digits = [int(part) for part in facts.version.split(".")[:2] if part.isdecimal()]
    if len(digits) == 2 and tuple(digits) < OLDEST_REDIS:
        yield Finding(
            "redis",
            "fail",
            f"version {facts.version} is too old",
            "kvroute's scripts use commands that it does not have",
            "Redis 6.2 or newer, or Valkey",
        )
    else:
        yield Finding("redis", "ok", f"version {facts.version or 'not told'}")


def _store_policy(facts: StoreFacts) -> Iterator[Finding]:
    if facts.policy not in ("", "noeviction"):
        yield Finding(
            "redis",
            "fail",
            f"maxmemory-policy is {facts.policy}",
            "it would drop parts of the index unseen; kvroute refuses to start with it",
            "redis-cli CONFIG SET maxmemory-policy noeviction, and in its configuration file",
        )
    elif facts.maxmemory_bytes and facts.used_bytes > 0.9 * facts.maxmemory_bytes:
        yield Finding(
            "redis",
            "warn",
            f"{facts.used_bytes / 1e9:.2f} of {facts.maxmemory_bytes / 1e9:.2f} GB (maxmemory) are used",
            "when it is full it refuses writes, and the index goes stale",
            "raise maxmemory",
        )
    else:
        yield Finding("redis", "ok", "evicts nothing")


def _store_latency(facts: StoreFacts) -> Iterator[Finding]:
    ping = f"PING takes {facts.ping_s * 1e3:.2f} ms, {facts.slowest_ping_s * 1e3:.2f} at worst"
    if facts.deadline_s and facts.ping_s > facts.deadline_s / 2:
        yield Finding(
            "redis",
            "warn",
            f"{ping}; a lookup may take {facts.deadline_s * 1e3:g} ms",
            "late lookups are answered from what this router sent itself",
            "a Redis nearer to kvroute, or a longer store.lookup_deadline_ms",
        )
    else:
        yield Finding("redis", "ok", ping)
