"""The shortlist finds what a price for every replica would find."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.routing import shortlist as module
from kvroute.routing.demand import Promise
from kvroute.routing.fleet import Fleet
from kvroute.routing.replica import Load, ReplicaId
from kvroute.routing.router import Router
from kvroute.routing.shortlist import Shortlist
from tests.routing.builders import ROUND, ask, replica

COUNT = 24
LOADS = st.tuples(
    st.integers(0, 40),
    st.integers(0, 60_000),
    st.integers(0, 110_000),
    st.integers(0, 150_000),
    st.sampled_from([1, 3]),
)


def fleet_under(loads: list[tuple[int, int, int, int, int]], *, has_shortlist: bool) -> Fleet:
    """Make a fleet whose replicas are loaded in turn as told: requests, prefill, KV, tokens in the cache, slowness."""
    fleet = Fleet(ROUND)
    names = [ReplicaId(f"r{number}") for number in range(COUNT)]
    for name in names:
        fleet.join(replica(name, context=None), now=0.0)
    for number, name in enumerate(names):
        _, _, _, filled, slowness = loads[number % len(loads)]
        fleet.report(name, Load(prompt_tokens=filled), 1.0)
        member = fleet.serving("m")[number]
        for _ in range(20 if slowness > 1 else 0):
            member.speed.prefill.learn(float(slowness))
        member.refresh_rates()
    promises = {}
    for number, name in enumerate(names):
        requests, prefill, kv, *_ = loads[number % len(loads)]
        promises[name] = Promise(requests, prefill, kv)
    fleet.set_others(promises)
    fleet._shortlists["m"] = Shortlist(fleet.serving("m"), group=4) if has_shortlist else None
    return fleet


@settings(deadline=None, max_examples=60)
@given(
    loads=st.lists(LOADS, min_size=1, max_size=COUNT),
    prompt=st.integers(1, 60_000),
    held=st.dictionaries(st.integers(0, COUNT - 1), st.integers(0, 60_000), max_size=COUNT),
    everybody_holds=st.integers(0, 2_000),
    weight=st.sampled_from([0.0, 0.8, 1.0]),
    gone=st.sets(st.integers(0, COUNT - 1), max_size=COUNT - 1),
)
def test_the_shortlist_chooses_as_pricing_everybody_does(loads, prompt, held, everybody_holds, weight, gone):
    """Whatever is promised, held and gone: the same replica at the same price, ties settled alike."""
    hits = {ReplicaId(f"r{number}"): held.get(number, everybody_holds) for number in range(COUNT)}
    hits = {id: tokens for id, tokens in hits.items() if tokens}
    avoid = {ReplicaId(f"r{number}") for number in gone}
    chosen = []
    for has_shortlist in (True, False):
        fleet = fleet_under(loads, has_shortlist=has_shortlist)
        router = Router(fleet, ttft_weight=weight)
        placements = [router.place(ask(prompt), hits, 2.0, avoid).placement for _ in range(3)]
        chosen.append([(one.replica, one.cost_s) for one in placements])
    assert chosen[0] == chosen[1]


def test_few_replicas_and_adapters_have_no_shortlist():
    """Where all can be priced, or a replica may have to load an adapter first, all are."""
    fleet = Fleet(ROUND)
    for number in range(module.REPLICAS_MIN - 1):
        fleet.join(replica(f"r{number}"), now=0.0)
    assert fleet.shortlist("m") is None
    fleet.join(replica("last"), now=0.0)
    assert fleet.shortlist("m") is not None
    assert fleet.shortlist("other") is None


def test_a_report_that_became_old_frees_a_replica_again():
    """What only an engine's gauge showed is forgotten in time, on a shortlist too."""
    fleet = Fleet(ROUND)
    for number in range(module.REPLICAS_MIN):
        fleet.join(replica(f"r{number}"), now=0.0)
        if number:
            fleet.report(ReplicaId(f"r{number}"), Load(running=2, kv_used_fraction=0.1), 0.0)
    fleet.report(ReplicaId("r0"), Load(running=9, kv_used_fraction=0.9), 0.0)
    router = Router(fleet)
    first = router.place(ask(100), {}, 1.0)
    assert first.replica.id != "r0"
    for number in range(1, module.REPLICAS_MIN):
        fleet.report(ReplicaId(f"r{number}"), Load(running=20, kv_used_fraction=0.9), 14.0)
    assert router.place(ask(100), {}, 15.5).replica.id == "r0"
