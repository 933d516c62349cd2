"""Verdicts on one replica: for each thing that can be wrong, its level and the flag that mends it."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from kvroute.routing.diagnosis import EVENTS_ON, judge_probe, judge_replica, release_of
from kvroute.routing.findings import EngineFacts, EventsFacts, ProbeFacts, ReplicaFacts, TokensFacts
from kvroute.routing.replica import ModelCard

ENGINE = EngineFacts(0, 16, 65_536, True)
PROBE = ProbeFacts(
    expected_tokens=74, prompt_tokens=74, predicted_tokens=64, cached_tokens=(0, 64), counted_hits=64, took_s=(0.2, 0.1)
)
EQUAL = TokensFacts("a chat", ours=12, theirs=12)
HEARD = EventsFacts(
    published=True,
    endpoint="tcp://gpu1:5557",
    heard=2,
    block_sizes=(16,),
    replay_endpoint="tcp://gpu1:5558",
    is_replayed=True,
)
WELL = ReplicaFacts(
    url="http://gpu1:8000",
    latency_s=0.001,
    clock_ahead_s=0.3,
    up_s=7300.0,
    version="0.33.0",
    cards=(ModelCard("m", 8192),),
    engines=(ENGINE,),
    model="m",
    tokens_by="local",
    tokens_why="the model's root, /m",
    tokens=(EQUAL,),
    probes=(PROBE,),
    events=(HEARD,),
)
DIFFERENT = TokensFacts("a tool call", ours=40, theirs=44, differs_at=7)
REFUSED = TokensFacts("a chat", ours=12, why="no use of the answer: /tokenize answered 404")
ASKED = TokensFacts("a chat", theirs=12, why="no files")
NOBODY = TokensFacts("a tool call", why="no use of the answer: /tokenize answered 400")


def table(findings):
    """Return level and whole text by check, without what is well."""
    return {one.check: (one.level, f"{one.says} | {one.costs} | {one.remedy}") for one in findings if one.level != "ok"}


def test_a_replica_that_is_well():
    """Nothing but good news, each with its figure."""
    findings = judge_replica(WELL)
    assert table(findings) == {}
    said = "; ".join(one.says for one in findings)
    for words in ("1.0 ms, up 2 h", "0.33.0", "m (8,192 tokens)", "blocks of 16", "65,536", "agree", "64 of 74"):
        assert words in said


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"ailment": "/health: Connection refused"}, "health", "fail", "--host 0.0.0.0"),
        ({"ailment": "/health answered 503"}, "health", "fail", "engine died"),
        ({"ailment": "/health answered 404"}, "health", "fail", "without /v1"),
        ({"ailment": "/health did not answer in 5 s"}, "health", "fail", "firewall"),
        ({"ailment": "/health: [SSL: CERTIFICATE_VERIFY_FAILED] x"}, "health", "fail", "authority"),
        ({"ailment": "/health: [SSL: WRONG_VERSION_NUMBER] x"}, "health", "fail", "http://"),
        ({"latency_s": 0.2}, "latency", "warn", "200 ms"),
        ({"version": None}, "version", "note", "does not say"),
        ({"version": "dev"}, "version", "note", "dev"),
        ({"version": "0.34.0rc1"}, "version", "warn", "0.9 to 0.33"),
        ({"version": "0.8.5"}, "version", "warn", "0.8.5"),
        ({"cards": (), "is_refused": True}, "api key", "fail", "wants an API key"),
        ({"cards": (), "is_refused": True, "has_key": True}, "api key", "fail", "refuses our API key"),
        ({"cards": ()}, "models", "fail", "/v1"),
        ({"model": "other"}, "models", "fail", "--served-model-name"),
        ({"engines": ()}, "metrics", "warn", "--disable-log-stats"),
        ({"engines": (replace(ENGINE, prefix_caching=False),)}, "prefix caching", "fail", "--enable-prefix-caching"),
        ({"engines": (replace(ENGINE, prefix_caching=None),)}, "prefix caching", "note", "hash probe"),
        ({"engines": (replace(ENGINE, block_size=None),)}, "block size", "warn", "assumes 16"),
        ({"engines": (replace(ENGINE, capacity_tokens=None),)}, "capacity", "warn", "hardware.gpu"),
        ({"tokens": (EQUAL, DIFFERENT)}, "tokens", "fail", "a tool call (from token 7 on: 40 here, 44 there)"),
        ({"tokens": (REFUSED,)}, "tokens", "note", "404"),
        ({"tokens": (ASKED,)}, "tokens", "note", "--tokenizer DIR"),
        ({"tokens": (ASKED,), "tokens_by": "none"}, "tokens", "warn", "as text"),
        ({"tokens": (EQUAL, NOBODY)}, "tokens", "warn", "a tool call"),
        ({"tokens": (DIFFERENT,), "probes": (replace(PROBE, prompt_tokens=99),)}, "tokens", "fail", "a tool call"),
        ({"events": (EventsFacts(),)}, "kv events", "note", "--kv-events tcp://*:5557"),
        ({"events": (EventsFacts(published=False),)}, "kv events", "warn", "--kv-events-config"),
        ({"events": (replace(HEARD, heard=0),)}, "kv events", "warn", "tcp://gpu1:5557 was silent"),
        ({"events": (replace(HEARD, heard=None, trouble="no connection"),)}, "kv events", "warn", "no connection"),
        ({"events": (replace(HEARD, block_sizes=(16, 64)),)}, "block size", "warn", "16, 64"),
        ({"events": (replace(HEARD, replay_endpoint="", is_replayed=None),)}, "replay", "warn", "is off"),
        ({"events": (replace(HEARD, replay_endpoint="", published=None),)}, "replay", "warn", "not tried"),
        ({"events": (replace(HEARD, is_replayed=False),)}, "replay", "warn", "buffer_steps"),
        ({"clock_ahead_s": -90.0}, "clock", "warn", "90 s behind"),
    ],
)
def test_one_thing_is_wrong(change, check, level, words):
    """Each fault is one line, of its level, that names what mends it, and nothing else is said."""
    found = table(judge_replica(replace(WELL, **change)))
    assert [(name, one[0]) for name, one in found.items()] == [(check, level)]
    assert words in found[check][1]


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"trouble": "/v1/chat/completions answered 400: x"}, "hash probe", "fail", "answered 400"),
        ({"cached_tokens": (0, 0)}, "hash probe", "fail", "computed twice"),
        ({"cached_tokens": (0, 48)}, "hash probe", "warn", "48 tokens reused of 74, 64 predicted"),
        ({"cached_tokens": (64, 64)}, "hash probe", "warn", "cached already"),
        ({"predicted_tokens": 0, "cached_tokens": (0, 0)}, "hash probe", "note", "does not fill a block"),
        ({"prompt_tokens": 75}, "tokens", "fail", "74 expected, but the engine read 75"),
        ({"cached_tokens": (None, None)}, "usage details", "warn", "--enable-prompt-tokens-details"),
    ],
)
def test_probes(change, check, level, words):
    """What the second of two equal prompts says about the engine and about our prediction."""
    found = table(judge_probe(replace(PROBE, **change)))
    assert [(name, one[0]) for name, one in found.items()] == [(check, level)]
    assert words in found[check][1]


@pytest.mark.parametrize(("hits", "level"), [(0, "fail"), (64, None), (None, "note")])
def test_without_usage_details_the_engines_counter_decides(hits, level):
    """Where answers do not tell, /metrics does: a counter that stands still is an engine that caches nothing."""
    found = table(judge_probe(replace(PROBE, cached_tokens=(None, None), counted_hits=hits)))
    assert found.get("hash probe", (None,))[0] == level


def test_an_approximate_prompt_is_not_held_to_its_prediction():
    """Where nobody can tokenise here, a hit of any length will do."""
    assert table(judge_probe(replace(PROBE, expected_tokens=None, cached_tokens=(0, 48)))) == {}


def test_ranks_are_named_where_there_are_several():
    """One line a rank, so that one knows which engine is meant."""
    engines = (ENGINE, EngineFacts(1, 16, 65_536, False))
    found = table(judge_replica(replace(WELL, engines=engines)))
    assert found["prefix caching"][1].startswith("is off (rank 1)")


@pytest.mark.parametrize(
    ("version", "release"),
    [("0.33.0", (0, 33)), ("v0.9.2rc1+cpu", (0, 9)), ("1.0.0", (1, 0)), ("0.0.0", None), ("dev", None), (None, None)],
)
def test_releases(version, release):
    """Release candidates and local builds count as their release; a build without a number has none."""
    assert release_of(version) == release


def test_the_flag_that_turns_events_on_is_the_documented_one():
    """Every version that publishes events takes it, so it names all four settings, as the first page does."""
    page = Path(__file__).parents[2] / "README.md"
    assert EVENTS_ON in " ".join(page.read_text().replace("\\\n", " ").split())
