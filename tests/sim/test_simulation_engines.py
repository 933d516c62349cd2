"""Engines on the simulated clock."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain
from kvroute.sim.replica import Limits, SimRequest
from kvroute.sim.simulation_clock import fs_of
from kvroute.sim.simulation_engines import Engine
from kvroute.sim.workload import Story
from tests.sim.fleets import engine


def request(number, prompt, output, key="x"):
    turn = Story(16).tell(key, prompt).ask(f"answer {number}", output)
    return SimRequest(f"q{number}", PrefixChain(turn.chain), prompt, output)


def log_of(arrivals, *, skips, reads=(), **fields):
    """Play arrivals (time in fs, request) on one engine; return everything it said, with its times."""
    one, log, todo = Engine(engine(**fields), 0, skips=skips), [], sorted(arrivals, key=lambda each: each[0])
    reads = sorted(reads)
    while todo or one.due_fs is not None or reads:
        due = one.due_fs
        coming = todo[0][0] if todo else None
        if reads and (due is None or reads[0] < due) and (coming is None or reads[0] < coming):
            log.append((reads[0], one.load(reads.pop(0), 0.0)))
        elif due is not None and (coming is None or due <= coming):
            progress = one.end(due)
            if progress.hits or progress.began or progress.finished or progress.events:
                log.append((due, progress))
        else:
            one.add(todo.pop(0)[1], coming)
    return log


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.sampled_from([400, 800, 4000]), st.booleans())
def test_skipped_steps_change_nothing(seed, count, kv_tokens, is_async):
    """Whatever arrives when, skipping steps gives the same events at the same times, to the femtosecond."""
    rng = Random(seed)
    arrivals = [
        (fs_of(rng.random() * 0.5), request(n, rng.randint(1, 300), rng.randint(1, 90), rng.choice("ab")))
        for n in range(count)
    ]
    reads = [fs_of(rng.random()) for _ in range(4)]
    limits = Limits(max_num_batched_tokens=128, async_scheduling=is_async)
    one, other = (
        log_of(arrivals, skips=skips, reads=list(reads), kv_tokens=kv_tokens, limits=limits) for skips in (True, False)
    )
    assert one == other


def test_an_engine_sleeps_until_it_is_asked():
    """Without work nothing is due; a request starts a step at once, and its end is announced."""
    one = Engine(engine(), 0)
    assert one.due_fs is None
    one.add(request(1, 100, 1), 5)
    assert one.due_fs > 5
    progress = one.end(one.due_fs)
    assert (list(progress.began), list(progress.finished), one.due_fs) == (["q1"], ["q1"], None)
    assert progress.hits == {"q1": 0}


def test_metrics_tell_of_steps_that_have_ended():
    """In the middle of a run of steps, the counters stand where single steps would have brought them."""
    one = Engine(engine(), 0)
    one.add(request(1, 100, 400), 0)
    one.end(one.due_fs)
    end = one.due_fs
    loads = [one.load(end * n // 10, 0.0).generation_tokens for n in range(1, 10)]
    assert loads == sorted(loads)
    assert loads[0] < loads[4] < loads[8]


def gauges(one, at_fs):
    load = one.load(at_fs, 0.0)
    return load.running, load.waiting, load.kv_used_fraction > 0


def test_gauges_are_of_the_last_steps_end():
    """As vLLM's: what a step admits, and who arrives while it runs, shows when it has ended."""
    one = Engine(engine(limits=Limits(max_num_seqs=1)), 0)
    one.add(request(1, 4000, 5), 0)
    one.add(request(2, 100, 5, "y"), 1)
    assert gauges(one, one.due_fs - 1) == (0, 0, False)
    one.end(one.due_fs)
    assert gauges(one, one.due_fs - 1) == (1, 0, True)
    one.end(one.due_fs)
    assert gauges(one, one.due_fs - 1) == (1, 1, True)
    while one.due_fs is not None:
        end = one.due_fs
        one.end(end)
    assert gauges(one, end + 1) == (0, 0, False)
