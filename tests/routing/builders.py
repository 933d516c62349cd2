"""Short ways to make fleets and demands, with hardware whose figures are easy to compute with by hand."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

from kvroute.kv.chain import PrefixChain, Root, chain_of, tokens_of
from kvroute.routing.demand import Demand
from kvroute.routing.fleet import Fleet
from kvroute.routing.rates import Rates
from kvroute.routing.replica import ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router

ROUND = Rates(fixed_s=0.01, token_s=0.001, step_s=0.01)  # 1,000 prefill tokens a second, 100 steps a second


def replica(name: str, *models: str, context: int | None = 8192, **fields: Any) -> Replica:
    """Make a replica that serves `models` (or "m") in blocks of 16, 100,000 tokens of cache."""
    given = {"block_size": 16, "capacity_tokens": 100_000, "max_num_seqs": 64, **fields}
    cards = tuple(ModelCard(model, context) for model in models or ("m",))
    return Replica(id=ReplicaId(name), url=f"http://{name}:8000", cards=cards, **given)


def fleet_of(*replicas: str | Replica) -> Fleet:
    """Make a fleet of replicas, given whole or by name."""
    fleet = Fleet(ROUND)
    for each in replicas:
        fleet.join(replica(each) if isinstance(each, str) else each, now=0.0)
    return fleet


def router_of(*replicas: str | Replica, policy: str = "kvroute", **options: Any) -> Router:
    """Make a router over such a fleet."""
    return Router(fleet_of(*replicas), policy, Random(7), **options)


def ask(tokens: int, model: str = "m", **fields: Any) -> Demand:
    """Make a demand of one prompt."""
    return Demand(model=model, prompt_tokens=tokens, **{"longest_prompt": tokens, "output_tokens": 100, **fields})


def chain(blocks: int, root: int = 0) -> PrefixChain:
    """Make a chain of so many blocks; with the same root, a longer one extends a shorter one."""
    return chain_of(tokens_of(range(blocks * 16)), 16, Root(root))


def hits(**tokens: int) -> dict[ReplicaId, int]:
    """Write hits as keyword arguments."""
    return {ReplicaId(name): count for name, count in tokens.items()}


def ids(names: str) -> Iterator[ReplicaId]:
    """Split names into ids."""
    return (ReplicaId(name) for name in names.split())
