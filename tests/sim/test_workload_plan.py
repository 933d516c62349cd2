"""From wishes to workloads."""

from __future__ import annotations

import json
from itertools import islice

import pytest

from kvroute.adapters.trace_files import Spool
from kvroute.errors import ConfigError
from kvroute.sim.workload import think_of
from kvroute.sim.workload_plan import Pace, of_profile, of_texts, of_trace, profile_of
from kvroute.sim.workload_trace import Naming, Trace

ROWS = [
    {"session_id": name, "timestamp": 1000 * at, "input_length": 64, "output_length": 4, "hash_ids": [n, n + 50]}
    for n, (name, at) in enumerate([("a", 0), ("b", 0), ("a", 9), ("b", 9), ("c", 12)])
]


def played(pace, seed=1):
    """Return (start, pauses) of every script."""
    with Spool(json.dumps(row).encode() for row in ROWS) as spool:
        work = of_trace(Trace(spool, Naming(32, 16)), pace, seed, has_times=True)
        return [(script.start_s, [turn.think_s for turn in script.turns]) for script in work]


def test_timestamps_are_an_open_loop_by_default():
    """Every request comes at its time, or sooner at a higher rate."""
    assert [at for at, _ in played(Pace())] == [0, 0, 9, 9, 12]
    assert [at for at, _ in played(Pace(rate=3.0))] == [0, 0, 3, 3, 4]


def test_jitter_spreads_what_was_stamped_together():
    """Requests of one stamp get times of their own within the step, the same for every run of a seed."""
    starts = [at for at, _ in played(Pace(jitter_s=2.0))]
    assert len(set(starts)) == 5
    assert all(0 <= at - stamp < 2 for at, stamp in zip(starts, (0, 0, 9, 9, 12), strict=True))
    assert starts == [at for at, _ in played(Pace(jitter_s=2.0))] != [at for at, _ in played(Pace(jitter_s=2.0), 2)]


def test_a_think_time_closes_the_loop():
    """Conversations begin at their first request's time, and go on a pause after each answer."""
    assert played(Pace(think=think_of("2"))) == [(0, [2, 2]), (0, [2, 2]), (12, [2])]


def test_starts_close_the_loop_and_come_at_random():
    """Conversations begin as a Poisson process, shuffled, with the pauses of the trace."""
    found = played(Pace(starts_s=0.5))
    assert sorted(len(pauses) for _, pauses in found) == [1, 2, 2]
    assert [at for at, _ in found] != [at for at, _ in played(Pace(starts_s=0.5), 2)]


def test_limits_hold_in_both_loops():
    """So many requests, or so many conversations."""
    assert len(played(Pace(limit=3))) == 3
    assert sum(len(pauses) for _, pauses in played(Pace(think=think_of("none"), limit=3))) == 3
    assert len(played(Pace(think=think_of("none"), sessions=2))) == 2


def test_texts_and_generators_are_paced_alike():
    """Recorded texts begin a second apart on average, generators at their own rate."""
    line = json.dumps({"messages": [{"role": "user", "content": "x" * 99}, {"role": "assistant", "content": "y" * 40}]})
    texts = list(of_texts(lambda: iter([line.encode()] * 500), 16, Pace(rate=2.0), 1))
    assert texts[-1].start_s == pytest.approx(250, rel=0.15)
    slow, fast = (list(of_profile("chat", {"sessions": "40"}, 16, Pace(rate=rate), 3)) for rate in (1.0, 4.0))
    assert slow[-1].start_s == pytest.approx(4 * fast[-1].start_s)
    with pytest.raises(ConfigError, match="chat:rate"):
        of_profile("chat", {}, 16, Pace(starts_s=1.0), 1)


def test_requests_can_be_played_one_at_a_time():
    """Alone, requests come in the order of their times, each when the last has ended, with one token of answer."""
    with Spool(json.dumps(row).encode() for row in ROWS) as spool:
        [script] = of_trace(Trace(spool, Naming(32, 16)), Pace(loop="alone", limit=4), 1, has_times=True)
        assert [turn.output_tokens for turn in script.turns] == [1] * 4
    [script] = of_profile("chat", {"sessions": "5"}, 16, Pace(loop="alone"), 1)
    assert len(list(script.turns)) > 5


def test_a_generator_can_be_opened():
    """In an open loop later turns come on their own, one request a script."""
    work = of_profile("chat", {"sessions": "20"}, 16, Pace(loop="open"), 3)
    assert all(len(list(script.turns)) == 1 for script in islice(work, 60))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("rag", ("rag", {})),
        ("rag:top=3,rate=2", ("rag", {"top": "3", "rate": "2"})),
        ("shared-prefix:stages=1x2,3x4,fresh=1", ("shared-prefix", {"stages": "1x2,3x4", "fresh": "1"})),
    ],
)
def test_generators_are_written_with_their_figures(text, found):
    """Values may hold commas."""
    assert profile_of(text) == found


def test_figures_without_a_name_are_refused():
    """The error shows the form."""
    with pytest.raises(ConfigError, match="KEY=VALUE"):
        profile_of("rag:3")
