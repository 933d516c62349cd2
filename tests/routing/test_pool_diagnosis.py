"""Verdicts on several replicas together, and on the store that routers share."""

import pytest
from msgspec.structs import replace

from kvroute.routing.findings import EngineFacts, ReplicaFacts, StoreFacts
from kvroute.routing.pool_diagnosis import judge_pool, judge_store
from kvroute.routing.replica import ModelCard

ONE = ReplicaFacts(
    url="http://a", version="0.33.0", cards=(ModelCard("m", 8192, "/m"),), engines=(EngineFacts(0, 16),), model="m"
)
STORE = StoreFacts(
    url="redis://r", version="7.2.4", policy="noeviction", ping_s=0.0002, slowest_ping_s=0.001, deadline_s=0.005
)


def pool(**change):
    """Two replicas that are alike, and a third one that may not be."""
    return [ONE, replace(ONE, url="http://b"), replace(ONE, url="http://c", **change)]


@pytest.mark.parametrize(
    ("change", "check", "level", "words"),
    [
        ({"engines": (EngineFacts(0, 32),)}, "block size", "warn", "16 tokens on 2; 32 tokens on http://c"),
        ({"cards": (ModelCard("m", 4096, "/m"),)}, "context", "warn", "8,192 tokens on 2; 4,096 tokens on http://c"),
        ({"cards": (ModelCard("m", 8192, "/n"),)}, "model files", "warn", "/n on http://c"),
        ({"version": "0.32.0"}, "version", "note", "0.33.0 on 2; 0.32.0 on http://c"),
        ({"model": "n", "cards": (ModelCard("n"),)}, "models", "note", "m on 2, n on 1"),
    ],
)
def test_a_replica_that_differs_is_named(change, check, level, words):
    """Replicas of one model ought to be alike; the odd one is named with its value."""
    [found] = judge_pool(pool(**change))
    assert (found.check, found.level) == (check, level)
    assert words in found.says


@pytest.mark.parametrize("change", [{}, {"engines": ()}, {"ailment": "gone", "cards": ()}])
def test_what_is_equal_or_unknown_is_not_mentioned(change):
    """A replica that does not tell is no difference."""
    assert judge_pool(pool(**change)) == []


@pytest.mark.parametrize(
    ("change", "level", "words"),
    [
        ({"trouble": "Connection refused"}, "fail", "Connection refused"),
        ({"version": "6.0.16"}, "fail", "too old"),
        ({"policy": "allkeys-lru"}, "fail", "noeviction"),
        ({"maxmemory_bytes": 1_000_000_000, "used_bytes": 950_000_000}, "warn", "0.95 of 1.00 GB"),
        ({"ping_s": 0.003}, "warn", "store.lookup_deadline_ms"),
    ],
)
def test_a_store_with_a_fault(change, level, words):
    """What makes the index unusable fails; what makes it late or full warns."""
    [found] = [one for one in judge_store(replace(STORE, **change)) if one.level != "ok"]
    assert found.level == level
    assert words in f"{found.says} {found.costs} {found.remedy}"


def test_a_store_that_is_well():
    """All of its lines are good."""
    assert {one.level for one in judge_store(STORE)} == {"ok"}
