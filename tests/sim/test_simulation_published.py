"""A published benchmark in small: what must come out whatever the figures of an engine model are.

llm-d's shared-prefix benchmark (groups with one system prompt each) on its fleet, with its scheduler configurations, in
a few of its stages; docs/simulating.md has the whole of it.
"""

from __future__ import annotations

from functools import cache
from statistics import fmean

import pytest
from msgspec import structs

from kvroute.sim.engine import RooflineTime
from kvroute.sim.presets import limits_of
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload_plan import Pace, of_profile
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset

pytestmark = pytest.mark.slow  # thousands of simulated requests

STAGES = "15x50,10x20,22x34,57x26"  # requests a second x seconds; the first one warms up
CLIENTS = 640
AS_IT_WAS = structs.replace(  # vLLM of September 2025: it did not schedule ahead, and admitted what a first chunk fits
    limits_of(gpu("h100")), async_scheduling=False, reserve_full_prompt=False
)
PRECISE, APPROXIMATE = ("blend", "exact"), ("blend:1:1:1", "original")
LOAD, RANDOM = ("blend:0:1:1", "original"), ("random", "exact")


@cache
def outcome(rule, fresh=False, gauges_late_s=0.0):
    policy, knowledge = rule
    engine = EngineSettings(
        kv_tokens=307_328,
        block_size=64,
        time=RooflineTime(preset("qwen3-32b"), gpu("h100"), parallel=Parallel(tp=2)),
        limits=AS_IT_WAS,
    )
    figures = {"stages": STAGES, "fresh": str(fresh)}
    routers = RouterSettings(policy=policy, knowledge=knowledge, metrics_every_s=0.05, metrics_lag_s=gauges_late_s)
    work = of_profile("shared-prefix", figures, 64, Pace(), 1)
    return Simulation(work, 8, engine, routers, seed=1, at_once=CLIENTS).run()


def late_s(rule, **more):
    return fmean(stage.ttft.p90 for stage in outcome(rule, **more).stages[2:])


def tokens_s(rule, **more):
    return fmean(stage.output_tokens_s for stage in outcome(rule, **more).stages[2:])


@pytest.mark.parametrize("blind", [RANDOM, LOAD])
@pytest.mark.parametrize("policy", ["kvroute", "blend", "sticky", "lmetric"])
def test_who_looks_for_prefixes_serves_more_where_others_collapse(policy, blind):
    """Random and load-only routing answer late and slowly, and hit little."""
    seeing = policy, "exact"
    assert outcome(seeing).hit_share > 2 * outcome(blind).hit_share
    assert late_s(seeing) < late_s(blind) / 1.5
    assert tokens_s(seeing) > 1.4 * tokens_s(blind)


@pytest.mark.parametrize("blind", [RANDOM, LOAD])
@pytest.mark.parametrize("policy", ["blend", "sticky"])
def test_llmds_rules_keep_first_tokens_early(policy, blind):
    """With the index none of their stages is late."""
    assert late_s((policy, "exact")) * 20 < late_s(blind)


@pytest.mark.parametrize("blind", [RANDOM, LOAD])
def test_knowledge_decides_in_the_published_order(blind):
    """What engines hold is better to know than what was sent to them, and that than nothing."""
    assert outcome(PRECISE).hit_share > outcome(APPROXIMATE).hit_share > outcome(blind).hit_share
    assert tokens_s(PRECISE) > tokens_s(APPROXIMATE) > tokens_s(blind)
    assert late_s(PRECISE) < late_s(APPROXIMATE) < late_s(blind)


def test_gauges_lead_load_only_routing_astray_where_little_runs():
    """Between two steps everybody is sent to the replica that was the emptiest: later first tokens than by chance."""
    first = [outcome(rule).stages[1].ttft.mean for rule in (LOAD, RANDOM)]
    assert first[0] > first[1]


def test_old_gauges_make_load_only_routing_worse_than_chance():
    """Where they are a second old, everybody is sent to the same replica for that long."""
    assert tokens_s(LOAD, gauges_late_s=1.0) < min(tokens_s(LOAD), tokens_s(RANDOM))
    assert late_s(LOAD, gauges_late_s=1.0) > max(late_s(LOAD), late_s(RANDOM))


@pytest.mark.parametrize("blind", [RANDOM, LOAD])
def test_fresh_questions_narrow_the_gap(blind):
    """Where only the system prompts can be hit, those that look for them still do better."""
    assert outcome(PRECISE, True).hit_share > outcome(blind, True).hit_share + 0.05
    assert tokens_s(PRECISE, fresh=True) > 1.05 * tokens_s(blind, fresh=True)
