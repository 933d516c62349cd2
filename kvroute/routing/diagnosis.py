"""Facts about one replica -> findings: what is wrong, what it costs, and the vLLM flag that mends it.

Which release brought which endpoint, and what the flags are called, follows vLLM 0.9.2 to 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from msgspec.structs import replace

from kvroute.routing.findings import EngineFacts, EventsFacts, Finding, ProbeFacts, ReplicaFacts, TokensFacts

KNOWN_FIRST, KNOWN_LAST = (0, 9), (0, 33)  # releases whose metrics and answers were compared with what is read here
SLOW_S = 0.05
CLOCK_S = 2.0  # the Date header has whole seconds, and servers renew it once a second

AILMENTS = {  # words in what was seen -> what mends it
    "CERTIFICATE": "an authority that this machine trusts, or kvroute's settings proxy.tls_ca or proxy.tls_verify",
    "SSL": "does it speak http:// only? Else look at vLLM's --ssl-keyfile and --ssl-certfile",
    "answered 503": "its engine died: vLLM's log says of what; restart it",
    "answered": "is this the URL of a vLLM server, without /v1 or another path at its end?",
    "disconnected": "does it speak https:// only? Else look into vLLM's log",
    "Name or service": "check the host's name in the URL, and DNS on this machine",
    "not answer": "is the machine down, or a firewall between?",
    "": "start vLLM with --host 0.0.0.0 and the --port of this URL; look into its log",
}


def judge_replica(facts: ReplicaFacts) -> list[Finding]:
    """Return what is to be said about one replica, in the order in which one would mend it."""
    if facts.ailment:
        return [
            Finding(
                "health",
                "fail",
                facts.ailment,
                "no request is sent there",
                next(remedy for words, remedy in AILMENTS.items() if words in facts.ailment),
            )
        ]
    return [
        *_reachable(facts),
        *_version(facts),
        *_models(facts),
        *_caches(facts),
        *_tokens(facts),
        *(finding for probe in _probes(facts) for finding in judge_probe(probe, _rank(facts, probe.engine))),
        *(finding for one in facts.events for finding in _events(one, facts)),
        *_clock(facts),
    ]


def _reachable(facts: ReplicaFacts) -> Iterator[Finding]:
    up = "" if facts.up_s is None or facts.up_s < 0 else f", up {_duration(facts.up_s)}"
    if facts.latency_s < SLOW_S:
        yield Finding("reachable", "ok", f"answers in {_ms(facts.latency_s)}{up}")
        return
    yield Finding(
        "latency",
        "warn",
        f"answers /health in {_ms(facts.latency_s)} at best{up}",
        "each request waits at least that long, and loads are old when they arrive",
        "run kvroute in the replicas' network; on a busy API server raise --api-server-count",
    )


def _version(facts: ReplicaFacts) -> Iterator[Finding]:
    release = release_of(facts.version)
    if release is None:
        said = "does not say its version" if facts.version is None else f"is of no known release: {facts.version[:40]}"
        yield Finding("version", "note", said, "metrics and answers may have other names than kvroute knows")
    elif not KNOWN_FIRST <= release <= KNOWN_LAST:
        known = " to ".join(".".join(map(str, one)) for one in (KNOWN_FIRST, KNOWN_LAST))
        yield Finding(
            "version",
            "warn",
            f"vLLM {facts.version} is not among the releases that kvroute was checked with, {known}",
            "what it reports may be misread; the other lines here say whether it is",
            "believe it where the hash probe is as predicted, else use a release in between",
        )
    else:
        yield Finding("version", "ok", f"vLLM {facts.version}")


def release_of(version: str | None) -> tuple[int, int] | None:
    """Return major and minor of a version such as 0.33.0rc1+cpu; None where it is none."""
    match = re.match(r"v?(\d{1,4})\.(\d{1,4})(?!\d)", version or "")
    return (int(match[1]), int(match[2])) if match and match[0].strip("v") != "0.0" else None


def _models(facts: ReplicaFacts) -> Iterator[Finding]:
    if facts.is_refused:
        said, mend = ("refuses our API key", "give the right key") if facts.has_key else ("wants an API key", "give it")
        yield Finding(
            "api key",
            "fail",
            f"{said} (401 from /v1/models)",
            "every request is refused",
            f"{mend} with --api-key, in kvroute's file as replicas[].api_key; vLLM has it from --api-key, VLLM_API_KEY",
        )
    elif not facts.cards:
        yield Finding(
            "models",
            "fail",
            facts.cards_trouble or "serves no model",
            "kvroute does not know what to send there",
            "is this the URL of a vLLM OpenAI server, without /v1 at its end?",
        )
    elif facts.model is None or all(card.name != facts.model for card in facts.cards):
        yield Finding(
            "models",
            "fail",
            f"does not serve {facts.model}, only {_few([card.name for card in facts.cards])}",
            "requests for that model never go there",
            "vLLM's --served-model-name, or another --model here",
        )
    else:
        yield Finding("models", "ok", _served(facts))


def _served(facts: ReplicaFacts) -> str:
    bases = [card for card in facts.cards if card.parent is None] or list(facts.cards)
    adapters = len(facts.cards) - len(bases)
    names = _few([card.name for card in bases])
    context = next((card.max_model_len for card in bases if card.max_model_len), None)
    return (
        f"serves {names}"
        + (f" ({context:,} tokens)" if context else "")
        + (f" and {adapters} adapters" if adapters else "")
    )


def _caches(facts: ReplicaFacts) -> Iterator[Finding]:
    if not facts.engines:
        yield Finding(
            "metrics",
            "warn",
            facts.metrics_trouble or "/metrics has no vllm: metrics",
            "load, block size and capacity are unknown: kvroute assumes blocks of 16, and counts only what it sends",
            "start vLLM without --disable-log-stats, and let kvroute reach /metrics",
        )
    for engine in facts.engines:
        yield from _cache(engine, _rank(facts, engine.engine))


def _cache(engine: EngineFacts, rank: str) -> Iterator[Finding]:
    if engine.prefix_caching is False:
        yield Finding(
            "prefix caching",
            "fail",
            f"is off{rank}",
            "every prompt is computed from its first token; no route is better than another",
            "vllm serve --enable-prefix-caching (the default: take --no-enable-prefix-caching out)",
        )
    elif engine.prefix_caching is None:
        yield Finding(
            "prefix caching", "note", f"/metrics does not say whether it is on{rank}; the hash probe tells", "", ""
        )
    else:
        yield Finding("prefix caching", "ok", f"prefix caching on{rank}")
    if engine.block_size is None:
        yield Finding(
            "block size",
            "warn",
            f"/metrics does not say it{rank}",
            "kvroute assumes 16; where the engine has another, hits are predicted in the wrong places",
            "use a vLLM whose /metrics has vllm:cache_config_info",
        )
    else:
        yield Finding("block size", "ok", f"blocks of {engine.block_size}{rank}")
    if engine.capacity_tokens is None:
        yield Finding(
            "capacity",
            "warn",
            f"/metrics does not say how many tokens its KV cache holds{rank}",
            "kvroute cannot keep a full cache from overflowing, and guesses what was evicted",
            "vLLM 0.24 or newer reports it; else kvroute's setting hardware.gpu",
        )
    else:
        yield Finding("capacity", "ok", f"{engine.capacity_tokens:,} tokens of KV cache{rank}")


def _tokens(facts: ReplicaFacts) -> Iterator[Finding]:
    if not facts.tokens:
        return
    wrong = [one for one in facts.tokens if one.differs_at is not None]
    if wrong:
        yield Finding(
            "tokens",
            "fail",
            f"differ from the replica's /tokenize for {', '.join(_difference(one) for one in wrong)} "
            f"(ours: {facts.tokens_why})",
            "kvroute asks the replica for every prompt, where its own check at start notices; else it predicts wrongly",
            "--tokenizer DIR with the very files that vLLM loads, or --tokenizer auto; the template must be that of "
            "vLLM's --chat-template, where it has one",
        )
        return
    equal = [one for one in facts.tokens if one.ours is not None and one.theirs is not None]
    if equal:
        yield Finding("tokens", "ok", f"tokens agree with /tokenize for {_few([one.prompt for one in equal], 4)}")
    if asked := [one for one in facts.tokens if one.ours is None and one.theirs is not None]:
        yield _asked(facts, asked)
    if silent := [one for one in facts.tokens if one.ours is not None and one.theirs is None]:
        yield Finding(
            "tokens",
            "note",
            f"could not be compared for {_few([one.prompt for one in silent], 4)}: {silent[0].why}",
            "a template or tokenizer that differs would go unseen",
            "the hash probe compares lengths; vLLM serves /tokenize unless something before it does not",
        )
    if nobody := [one for one in facts.tokens if one.ours is None and one.theirs is None]:
        yield Finding(
            "tokens",
            "warn",
            f"neither our files nor /tokenize give any for {_few([one.prompt for one in nobody], 4)}: {nobody[0].why}",
            "such prompts are hashed as text, and hits are approximate",
            "none, where the model's template refuses such chats; else --tokenizer DIR with the model's files",
        )


def _asked(facts: ReplicaFacts, asked: list[TokensFacts]) -> Finding:
    prompts = "every prompt" if len(asked) == len(facts.tokens) else _few([one.prompt for one in asked], 4)
    if facts.tokens_by == "none":
        return Finding(
            "tokens",
            "warn",
            "prompts are hashed as text, as configured (tokenizer: none)",
            "hits are approximate",
            "--tokenizer auto, or DIR",
        )
    return Finding(
        "tokens",
        "note",
        f"are asked of the replica for {prompts} ({facts.tokens_why})",
        "a round trip to it for each new prompt",
        "--tokenizer DIR with the model's files, unless its engine alone can render its chats",
    )


def _difference(one: TokensFacts) -> str:
    return f"{one.prompt} (from token {one.differs_at} on: {one.ours} here, {one.theirs} there)"


def _probes(facts: ReplicaFacts) -> Iterator[ProbeFacts]:
    """Yield the probes; where tokens are known to differ, their length is no news."""
    is_known = any(one.differs_at is not None for one in facts.tokens)
    for probe in facts.probes:
        yield replace(probe, expected_tokens=None) if is_known else probe


def judge_probe(probe: ProbeFacts, rank: str = "") -> Iterator[Finding]:
    """Yield what the prompt that was sent twice shows."""
    if probe.trouble:
        yield Finding(
            "hash probe",
            "fail",
            f"could not be sent{rank}: {probe.trouble}",
            "nobody knows whether prefixes are reused there",
            "send a chat of your own with curl, and look into vLLM's log",
        )
        return
    if probe.expected_tokens is not None and probe.expected_tokens != probe.prompt_tokens:
        yield Finding(
            "tokens",
            "fail",
            f"of a chat: {probe.expected_tokens} expected, but the engine read {probe.prompt_tokens}{rank}",
            "hits are predicted in the wrong places",
            "does something between kvroute and vLLM change requests? does --default-chat-template-kwargs?",
        )
    first, second = probe.cached_tokens
    if second is None:
        yield Finding(
            "usage details",
            "warn",
            f"answers do not say how much came from the cache{rank}",
            "delivered hits, and whether predictions come true, stay unknown",
            "vllm serve --enable-prompt-tokens-details",
        )
        yield from _counted(probe, rank)
        return
    yield Finding("usage details", "ok", f"usage details on{rank}")
    yield from _delivered(probe, first or 0, second, rank)


def _counted(probe: ProbeFacts, rank: str) -> Iterator[Finding]:
    """Judge by the engine's own counter, which counts other clients as well."""
    if probe.counted_hits is None:
        yield Finding("hash probe", "note", f"cannot be judged{rank}: neither usage nor /metrics count hits")
    elif probe.counted_hits == 0:
        yield _missed(probe, rank)
    else:
        hits = f"{probe.counted_hits:,} tokens hit in /metrics, {probe.predicted_tokens:,} predicted"
        yield Finding("hash probe", "ok", f"hash probe: {hits}{rank}")


def _delivered(probe: ProbeFacts, first: int, second: int, rank: str) -> Iterator[Finding]:
    predicted = probe.predicted_tokens
    if predicted == 0:
        yield Finding(
            "hash probe",
            "note",
            f"shows nothing{rank}: a prompt of {probe.prompt_tokens:,} tokens does not fill a block",
            "nothing is reused at this context length, whichever way requests go",
            "a longer --max-model-len or a smaller --block-size",
        )
    elif second == 0:
        yield _missed(probe, rank)
    elif first >= second:
        yield Finding(
            "hash probe",
            "warn",
            f"a prompt that nobody sent before was cached already, {first:,} tokens of {probe.prompt_tokens:,}{rank}",
            "the engine's count of hits cannot be believed",
            "does something between kvroute and vLLM answer from a cache of its own?",
        )
    elif second != predicted and probe.expected_tokens is not None:
        yield Finding(
            "hash probe",
            "warn",
            f"{second:,} tokens reused of {probe.prompt_tokens:,}, {predicted:,} predicted{rank}",
            "predictions are off by this much for every request",
            "does the block size above hold? Hybrid models reuse larger blocks; --speculative-config can drop the last",
        )
    else:
        yield Finding("hash probe", "ok", f"hash probe: {second:,} of {probe.prompt_tokens:,} tokens reused{rank}")


def _missed(probe: ProbeFacts, rank: str) -> Finding:
    return Finding(
        "hash probe",
        "fail",
        f"a prompt of {probe.prompt_tokens:,} tokens sent twice was computed twice{rank}; "
        f"{probe.predicted_tokens:,} tokens were predicted to be reused",
        "no route is better than another",
        "vllm serve --enable-prefix-caching; some models and backends switch it off, the start-up log says so; "
        "is the cache so full that it keeps nothing, or is a balancer behind this URL?",
    )


EVENTS_ON = (  # all four: before 0.11 the publisher has to be named
    """--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", """
    """"replay_endpoint": "tcp://*:5558"}'"""
)


def _events(events: EventsFacts, facts: ReplicaFacts) -> Iterator[Finding]:
    rank = _rank(facts, events.engine)
    guessed = "what was evicted there, and what others computed, is guessed from what kvroute sends itself"
    if events.published is None and not events.endpoint:
        yield Finding(
            "kv events",
            "note",
            f"cannot be known from outside{rank}: no /kv_event_sources, which vLLM has since 0.31",
            "if there are none, " + guessed,
            "where vLLM has them on: --kv-events tcp://*:5557 here, events.endpoint in kvroute's file",
        )
    elif not events.endpoint:
        yield Finding("kv events", "warn", f"are off{rank}", guessed, f"vllm serve {EVENTS_ON}")
    elif events.trouble or not events.heard:
        yield Finding(
            "kv events",
            "warn",
            f"are not heard{rank}: {events.trouble or f'{events.endpoint} was silent during the hash probe'}",
            guessed,
            'open the port to kvroute; an "endpoint" without a * is one that vLLM dials; a "topic" is events.topic',
        )
    else:
        yield Finding("kv events", "ok", f"KV events heard{rank}")
        yield from _heard(events, facts, rank)


def _heard(events: EventsFacts, facts: ReplicaFacts, rank: str) -> Iterator[Finding]:
    """Judge what comes with a stream that works: its blocks, and its replay."""
    told = next((one.block_size for one in facts.engines if one.engine == events.engine), None)
    if told is not None and any(size != told for size in events.block_sizes):
        yield Finding(
            "block size",
            "warn",
            f"events speak of blocks of {', '.join(map(str, events.block_sizes))}, /metrics of {told}{rank}",
            "hits are predicted in the wrong places",
            "hybrid models have several; the hash probe says whether kvroute goes by the right one",
        )
    lost = "after lost events kvroute must doubt all that it knows of this replica, and starts with nothing"
    if not events.replay_endpoint:
        off = "is off" if events.published else "was not tried: --kv-events names no second endpoint"
        yield Finding("replay", "warn", f"of KV events {off}{rank}", lost, f"vllm serve {EVENTS_ON}")
    elif events.is_replayed:
        yield Finding("replay", "ok", f"replay on{rank}")
    else:
        yield Finding(
            "replay",
            "warn",
            f"of KV events does not give the last one again{rank} ({events.replay_endpoint})",
            lost,
            'open that port to kvroute; "buffer_steps" must be above 0',
        )


def _clock(facts: ReplicaFacts) -> Iterator[Finding]:
    ahead = facts.clock_ahead_s
    if ahead is None:
        return
    if abs(ahead) <= CLOCK_S:
        yield Finding("clock", "ok", "clocks agree")
        return
    yield Finding(
        "clock",
        "warn",
        f"its clock is {_duration(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} ours",
        "logs do not line up, and templates that write today's date give other tokens around midnight",
        "run NTP (chrony, systemd-timesyncd) on both machines",
    )


def _rank(facts: ReplicaFacts, engine: int) -> str:
    return f" (rank {engine})" if len(facts.engines) > 1 else ""


def _few(names: list[str], most: int = 3) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < 0.1 else f"{seconds * 1e3:,.0f} ms"


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.0f} {unit}"
    return f"{seconds:,.0f} s"
