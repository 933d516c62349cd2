"""Small fleets and workloads for tests of the simulation."""

from __future__ import annotations

from typing import Any

from kvroute.sim.engine import default_time
from kvroute.sim.replica import Limits
from kvroute.sim.simulation import Simulation
from kvroute.sim.simulation_figures import Outcomes
from kvroute.sim.simulation_settings import EngineSettings, RouterSettings
from kvroute.sim.workload import Script, Story, Workload

BLOCK = 16
OWN = ("seed", "happenings", "warmup_s", "at_once", "skips", "history_blocks", "on_progress")  # of Simulation


def engine(kv_tokens: int = 100_000, **fields: Any) -> EngineSettings:
    """Describe an engine as fast as an 8B model on one H100."""
    return EngineSettings(**{"kv_tokens": kv_tokens, "block_size": BLOCK, "time": default_time(), **fields})


def play(
    workload: Workload, replicas: int = 2, policy: str = "kvroute", *, kv_tokens: int = 100_000, **fields: Any
) -> Outcomes:
    """Run a simulation; `fields` are those of RouterSettings, or of Simulation."""
    own = {name: fields.pop(name) for name in OWN if name in fields}
    of_engine = {"limits": fields.pop("limits", Limits()), "offload": fields.pop("offload", None)}
    return Simulation(
        workload, replicas, engine(kv_tokens, **of_engine), RouterSettings(policy=policy, **fields), **own
    ).run()


def once(at_s: float, key: str, tokens: int = 1000, output: int = 50, *, shared: int = 0) -> Script:
    """Make a request of its own text, behind `shared` tokens that others have too."""
    story = Story(BLOCK)
    if shared:
        story.tell("shared", shared)
    return Script(at_s, iter((story.tell(key, tokens).ask(f"answer to {key}", output),)))


def talk(at_s: float, key: str, turns: int, think_s: float = 1.0, *, grows: int = 500, output: int = 50) -> Script:
    """Make a conversation that grows by `grows` tokens and an answer each turn."""
    story, sent = Story(BLOCK), []
    for turn in range(turns):
        story.tell(f"{key} {turn}", grows)
        sent.append(story.ask(f"{key} answer {turn}", output, think_s))
    return Script(at_s, iter(sent))
