"""The simulated engine against vLLM's own scheduler and cache manager, round by round, event for event."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.vllm.engines import environment, venv
from tests.vllm.scripts import first_difference, script_of, simulate

pytestmark = pytest.mark.vllm
SCRIPTS = int(os.environ.get("KVROUTE_SCHEDULER_SCRIPTS", "400"))
FIRST_SEED = int(os.environ.get("KVROUTE_SCHEDULER_SEED", "0"))
PREEMPTIONS_LEAST = 100  # over all scripts: fewer would mean that the scripts try too little
EVENTS_LEAST = 5_000


@pytest.fixture(scope="module")
def compared():
    """The scripts, each with vLLM's trace of it."""
    scripts = [script_of(seed) for seed in range(FIRST_SEED, FIRST_SEED + SCRIPTS)]
    done = subprocess.run(
        [venv() / "bin" / "python", Path(__file__).with_name("scheduler_probe.py")],
        input="".join(json.dumps(script) + "\n" for script in scripts),
        capture_output=True,
        text=True,
        env=environment(),
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    traces = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(traces) == len(scripts)
    return list(zip(scripts, traces, strict=True))


def test_every_step_is_the_engines_own(compared):
    """Tokens scheduled, preemptions, hits, events, the queue of free blocks and counters agree in every step."""
    differences = [
        f"seed {FIRST_SEED + number}: {found}"
        for number, (script, trace) in enumerate(compared)
        if (found := first_difference(script, simulate(script), trace))
    ]
    assert differences == []


def test_the_scripts_try_what_matters(compared):
    """They preempt, evict, hit, abort, reset, and use both policies and both kinds of scheduling."""
    rounds = [each for _, trace in compared for each in trace]
    assert sum(len(each["preempted"]) for each in rounds) > PREEMPTIONS_LEAST
    assert sum(len(each["events"]) for each in rounds) > EVENTS_LEAST
    kinds = {event[0] for each in rounds for event in each["events"]}
    hits = sum(1 for each in rounds for cached in each["cached"].values() if cached)
    settings = {(script["settings"]["policy"], script["settings"]["async_scheduling"]) for script, _ in compared}
    assert (kinds, hits > 0, len(settings)) == ({"S", "R", "C"}, True, 4)
