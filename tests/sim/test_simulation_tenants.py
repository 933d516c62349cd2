"""A tenant that asks for little beside one that asks for more than there is: what it notices of that."""

from __future__ import annotations

from functools import cache

from kvroute.routing.admission import AdmissionSettings
from kvroute.sim.engine import default_time
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_figures import Outcomes
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload import tenanted
from kvroute.sim.workload_plan import Pace, of_profile, rng_of

WORK = {
    "prompts": ("chat", {"turns": "1", "question": "2000", "output": "60", "rate": "33", "sessions": "800"}, 300_000),
}


@cache
def played(work: str, policy: str, only: str | None = None) -> Outcomes:
    name, figures, kv_tokens = WORK[work]
    engine = EngineSettings(kv_tokens=kv_tokens, block_size=64, time=default_time())
    admission = AdmissionSettings(hold_s=1e6)
    scripts = tenanted(of_profile(name, figures, 64, Pace(), 1), (9.0, 1.0), rng_of(1, "tenants"), only)
    return Simulation(scripts, 2, engine, RouterSettings(policy=policy, admission=admission), by_tenant=True).run()


def late(work: str, policy: str) -> float:
    """Return by how many times the small tenant's first tokens are later than alone, the slowest tenth apart."""
    return played(work, policy).tenants["2"].ttft.p90 / played(work, policy, "2").tenants["2"].ttft.p90


def test_a_tenant_hardly_notices_another_ones_flood_of_prompts():
    """Under a rule that knows no tenants it waits as long as everybody; here no longer than a request takes."""
    assert late("prompts", "lmetric") > 10
    assert late("prompts", "kvroute") < 2


def test_the_flood_is_served_nearly_as_fast():
    """What is left free for others costs little."""
    assert played("prompts", "kvroute").output_tokens_s > 0.8 * played("prompts", "lmetric").output_tokens_s
