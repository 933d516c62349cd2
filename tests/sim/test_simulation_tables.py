"""Hit shares on a recorded trace, beside those that a plain replay of its block ids through LRU caches gave.

The trace is a part of Mooncake's conversation hour (tests/data/README.md). Eight caches, blocks of 512 tokens, time and
answers ignored; the shares of the plain replay were computed once, with an independent program of 30 lines.
"""

from __future__ import annotations

from random import Random

import pytest

from kvroute.adapters.trace_files import Spool, lines_of
from kvroute.sim.engine import default_time
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload_plan import Pace, of_trace
from kvroute.sim.workload_trace import Naming, Trace, read_row
from tests.data_files import DATA

pytestmark = pytest.mark.slow  # thousands of simulated requests

BLOCK = 512
MILLION = 1_000_000
ENOUGH = 80_000_000  # no cache fills up


@pytest.fixture(scope="module")
def spool():
    with Spool(lines_of(DATA / "mooncake_conversation_a.jsonl.gz")) as found:
        yield found


def replay(spool, policy, replicas, kv_tokens, choose=None, limit=None):
    """Return hit share, reachable share and imbalance of a policy; `choose` stands in its place."""
    work = of_trace(Trace(spool, Naming(BLOCK, BLOCK)), Pace(loop="alone", limit=limit), 1, has_times=True)
    engine = EngineSettings(kv_tokens=kv_tokens, block_size=BLOCK, time=default_time())
    run = Simulation(work, replicas, engine, RouterSettings(policy=policy, metrics_every_s=1e5))
    if choose is not None:
        run._fronts[0].router._baseline = choose
    result = run.run()
    return result.hit_share, result.reachable_share, result.imbalance


def by_session(spool):
    """Return a policy that keeps each session where its name's hash falls."""
    names = iter([read_row(line).session_id for line, _ in spool.by_time()])

    def choose(members, case):
        return members[Random(str(next(names))).randrange(len(members))]

    return choose


def test_a_short_part_of_the_trace_has_the_shares_of_a_plain_replay(spool):
    """The first 1,500 requests, one cache and eight in turn, are within 0.01 of a replay with an ordered dict."""
    for replicas, kv_tokens in ((1, MILLION), (8, 250_000)):
        policy = "round-robin"
        assert replay(spool, policy, replicas, kv_tokens, limit=1500)[0] == pytest.approx(
            plain_replay(spool, replicas, kv_tokens, 1500), abs=0.01
        )


def plain_replay(spool, replicas, kv_tokens, limit):
    """Return the hit share of LRU caches in turn, by block ids alone."""
    caches, hits, total = [{} for _ in range(replicas)], 0, 0
    for number, (line, _) in zip(range(limit), spool.by_time(), strict=False):
        row, cache = read_row(line), caches[number % replicas]
        found = next((n for n, block in enumerate(row.hash_ids) if block not in cache), len(row.hash_ids))
        for block in reversed(row.hash_ids):
            cache.pop(block, None)
            cache[block] = None
        while len(cache) > kv_tokens / BLOCK:
            del cache[next(iter(cache))]
        hits += min(found * BLOCK, (row.input_length - 1) // BLOCK * BLOCK)
        total += row.input_length
    return hits / total


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "replicas", "kv_tokens", "share"),
    [
        ("round-robin", 1, 8 * MILLION, 0.255),
        ("round-robin", 8, MILLION, 0.080),
        ("session", 8, MILLION, 0.235),
        ("consistent-hash", 8, MILLION, 0.254),
        ("lmetric", 8, MILLION, 0.052),
        ("round-robin", 1, ENOUGH, 0.346),
        ("round-robin", 8, ENOUGH, 0.123),
        ("session", 8, ENOUGH, 0.323),
        ("consistent-hash", 8, ENOUGH, 0.346),
        ("lmetric", 8, ENOUGH, 0.346),
    ],
)
def test_hit_shares_are_those_of_a_plain_replay(spool, policy, replicas, kv_tokens, share):
    """One pooled cache, turns, sessions, the hash of the first 1,024 tokens, and the longest match, which piles up."""
    choose = by_session(spool) if policy == "session" else None
    name = "random" if choose else policy
    hits, reachable, imbalance = replay(spool, name, replicas, kv_tokens, choose)
    assert hits == pytest.approx(share, abs=0.01)
    assert reachable == pytest.approx(0.346, abs=0.001)
    if policy == "lmetric":
        assert imbalance == pytest.approx(8.0)
