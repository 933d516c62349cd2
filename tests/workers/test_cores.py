"""How many cores there are to use."""

from __future__ import annotations

import os

import pytest

from kvroute.config import Config, load
from kvroute.errors import ConfigError
from kvroute.workers.cores import WORKERS_DEFAULT_MAX, usable_cores, workers_for

ALLOWED = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000", ALLOWED),
        ("100000 100000", 1),
        ("150000 100000", min(2, ALLOWED)),
        ("1000 100000", 1),
        ("", ALLOWED),
    ],
)
def test_a_quota_limits_the_cores(tmp_path, text, cores):
    """A container's quota counts in started cores; without one the scheduler's mask does."""
    quota = tmp_path / "cpu.max"
    quota.write_text(text)
    assert usable_cores(quota) == cores


def test_no_quota_file(tmp_path):
    """Where there is no such file the mask alone counts."""
    assert usable_cores(tmp_path / "none") == ALLOWED


def test_as_many_workers_as_cores_within_reason():
    """Without a number there are as many as cores, at most eight; a number that is given counts as it is."""
    assert workers_for(Config()) == min(usable_cores(), WORKERS_DEFAULT_MAX)
    assert workers_for(Config(workers=11)) == 11


def test_an_index_in_memory_is_for_one():
    """A store in memory means one worker, and more of them are refused with the remedy."""
    memory = {"store.kind": "memory"}
    assert workers_for(load(None, env={}, overrides=memory)) == 1
    with pytest.raises(ConfigError, match=r"`workers`: 2 .*`store.kind`: redis"):
        workers_for(load(None, env={}, overrides={**memory, "workers": 2}))
