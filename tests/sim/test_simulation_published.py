"""A published benchmark in small: what must come out whatever the figures of an engine model are.

llm-d's shared-prefix benchmark (groups with one system prompt each) on a quarter of its fleet, at a quarter of its
rates and with answers as long as its published tokens a second imply; docs/simulating.md has the whole of it.
"""

from __future__ import annotations

from functools import cache

import pytest

from kvroute.sim.engine import RooflineTime
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload_plan import Pace, of_profile
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset

pytestmark = pytest.mark.slow  # thousands of simulated requests

WARM_S, STAGES = 50.0, "4x50,8x20,12x20,15x20"


@cache
def outcome(policy, fresh=False):
    time = RooflineTime(preset("qwen3-32b"), gpu("h100"), parallel=Parallel(tp=2))
    engine = EngineSettings(kv_tokens=307_328, block_size=64, time=time)
    figures = {"groups": "38", "output": "242", "stages": STAGES, "fresh": str(fresh)}
    work = of_profile("shared-prefix", figures, 64, Pace(), 1)
    return Simulation(work, 2, engine, RouterSettings(policy=policy), seed=1, warmup_s=WARM_S).run()


@pytest.mark.parametrize("policy", ["kvroute", "blend", "sticky", "lmetric"])
@pytest.mark.parametrize("blind", ["random", "least-request"])
@pytest.mark.parametrize(("fresh", "factor"), [(False, 5), (True, 1.5)])
def test_who_looks_for_prefixes_keeps_up_where_others_collapse(policy, blind, fresh, factor):
    """Random and load-only routing are late by far more, most of all where questions repeat and can be hit as well."""
    seeing, other = outcome(policy, fresh), outcome(blind, fresh)
    assert seeing.hit_share > other.hit_share + 0.05
    assert seeing.ttft.p90 * factor < other.ttft.p90
    assert seeing.output_tokens_s > 1.05 * other.output_tokens_s
