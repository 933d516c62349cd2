"""Placement, told as conversations: what happens, and where each request goes.

A line is an event. `ask TOKENS [replica=HIT ...] -> replica` places a request (the first is #1), `began 1`, `done 1`,
`gone 1` and `fail 1` are what becomes of it; `join`, `leave`, `drain`, `undrain`, `down`, `up` are about replicas.
Replicas compute 1,000 prefill tokens a second and take 10 ms a decode step; answers are 100 tokens long.
"""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.errors import ConfigError, KvrouteError, NoReplica
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.cost import TERMS, Slo, compute_tokens
from kvroute.routing.demand import Outcome, Promise
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.offers import TIE_SHARE
from kvroute.routing.replica import Load, ModelCard, Replica, ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ROUND, ask, chain, fleet_of, hits, ids, replica, router_of

CONVERSATIONS = {
    "a conversation stays where its history is": """
        ask 1000           -> r0
        done 1
        ask 1200 r0=1000   -> r0
        done 2
        ask 1500 r0=1200   -> r0
    """,
    "a miss goes where the work is least": """
        ask 4000           -> r0
        ask 100            -> r1
        ask 100            -> r1
    """,
    "a hit is worth waiting for, up to what it saves": """
        ask 1000 r0=900    -> r0
        ask 2000 r0=1900   -> r0
        ask 5000           -> r1
        ask 9000 r1=8000   -> 400
        ask 8000 r1=1000   -> r0
    """,
    "a busy holder is left when computing again is faster": """
        ask 6000 r0=100    -> r0
        ask 1000 r0=900    -> r1
    """,
    "paced traffic, with nothing in flight, goes round": """
        ask 500            -> r0
        done 1
        ask 500            -> r1
        done 2
        ask 500            -> r0
        done 3
        ask 500            -> r1
    """,
    "equal costs go to the fewest in flight": """
        ask 100 r0=99      -> r0
        began 1
        ask 4000           -> r1
        done 2
        ask 4000           -> r1
    """,
    "a draining replica finishes and gets nothing more": """
        ask 1000           -> r0
        drain r0
        ask 1200 r0=1000   -> r1
        done 1
        undrain r0
        ask 1200 r0=1000   -> r0
    """,
    "an unhealthy replica is passed over and comes back": """
        down r0
        ask 1000 r0=900    -> r1
        down r1
        ask 1000           -> 503
        up r0
        ask 1000           -> r0
    """,
    "a replica that fails again and again is taken out": """
        ask 1000 r0=900    -> r0
        fail 1
        ask 1000 r0=900    -> r0
        fail 2
        ask 1000 r0=900    -> r0
        fail 3
        ask 1000 r0=900    -> r1
        up r0
        ask 1000 r0=900    -> r0
    """,
    "a client that leaves costs its replica nothing": """
        ask 1000 r0=900    -> r0
        gone 1
        ask 1000 r0=900    -> r0
        gone 2
        ask 1000 r0=900    -> r0
        gone 3
        ask 1000 r0=900    -> r0
    """,
    "a replica that joins late gets its share, not all": """
        ask 1000           -> r0
        ask 1000           -> r1
        join r2
        ask 1000           -> r2
        ask 1000           -> r0
        ask 1000           -> r1
        ask 1000           -> r2
    """,
    "a replica that leaves gets nothing": """
        leave r0
        ask 1000 r0=900    -> r1
        leave r1
        ask 1000           -> 503
    """,
}


class Stage:
    """Plays events on a fleet of two."""

    def __init__(self) -> None:
        self.router = router_of("r0", "r1")
        self.leases: list[Lease] = []
        self.now = 0.0

    def play(self, event: str) -> str | None:
        verb, *words = event.split()
        self.now += 0.001
        if verb == "ask":
            return self.ask(int(words[0]), dict(word.split("=") for word in words[1:]))
        if verb in {"began", "done", "gone", "fail"}:
            self.become(verb, self.leases[int(words[0]) - 1])
        else:
            self.change(verb, ReplicaId(words[0]))
        return None

    def ask(self, tokens: int, held: dict[str, str]) -> str:
        known = {ReplicaId(name): int(hit) for name, hit in held.items()}
        try:
            self.leases.append(self.router.place(ask(tokens), known, self.now))
        except KvrouteError as error:
            return str(error.status)
        return self.leases[-1].replica.id

    def become(self, verb: str, lease: Lease) -> None:
        if verb == "began":
            lease.began(self.now)
        else:
            outcome = {"done": Outcome.DONE, "gone": Outcome.ABANDONED, "fail": Outcome.FAILED}[verb]
            lease.finish(outcome, self.now)

    def change(self, verb: str, id: ReplicaId) -> None:
        fleet = self.router.fleet
        if verb == "join":
            fleet.join(replica(id), self.now)
        elif verb == "leave":
            fleet.leave(id)
        elif verb in {"drain", "undrain"}:
            fleet.set_draining(id, verb == "drain")
        else:
            fleet.set_health(id, verb == "up")


@pytest.mark.parametrize("script", CONVERSATIONS.values(), ids=CONVERSATIONS)
def test_conversation(script: str):
    """Every request of the conversation goes where the table says."""
    stage, expected, seen = Stage(), [], []
    for line in filter(None, map(str.strip, script.splitlines())):
        event, _, place = line.partition("->")
        found = stage.play(event)
        expected.append(line)
        seen.append(f"{event}-> {found}" if place else line)
    assert seen == expected


def test_a_first_block_that_all_share_does_not_draw_all_to_one():
    """Hot spot: sixty conversations that share their system prompt, held by one replica, spread over all four."""
    router, shared = router_of("r0", "r1", "r2", "r3"), {ReplicaId("r0"): 512}
    for _ in range(60):
        lease = router.place(ask(2_000), shared, now=0.0)
        shared[lease.replica.id] = 512
    assert max(promise.requests for promise in router.fleet.promises().values()) <= 18


def test_the_hot_prefix_is_used_while_nobody_waits():
    """The same conversations, one after the other, all stay with the holder: spreading is load's doing alone."""
    router = router_of("r0", "r1", "r2", "r3")
    for turn in range(20):
        with router.place(ask(2_000), hits(r2=512), now=float(turn)) as lease:
            assert lease.replica.id == "r2"


def test_a_burst_on_a_fresh_replica_is_shared():
    """Slow start: of forty cold requests at once, a replica that has just recovered takes its half, no more."""
    router = router_of("r0", "r1")
    router.fleet.set_health(ReplicaId("r1"), False)
    for _ in range(5):
        router.place(ask(500), {}, now=0.0).finish(Outcome.DONE, 1.0)
    router.fleet.set_health(ReplicaId("r1"), True)
    chosen = Counter(router.place(ask(500), {}, now=1.0).replica.id for _ in range(40))
    assert chosen == {"r0": 20, "r1": 20}


def test_few_long_prompts_weigh_more_than_many_short_ones():
    """Requests are not the measure: one prompt of 6,000 tokens keeps more away than ten of 100."""
    router = router_of("r0", "r1")
    router.place(ask(6_000), {}, now=0.0)
    chosen = {router.place(ask(100), {}, now=0.0).replica.id for _ in range(10)}
    assert chosen == {"r1"}


def test_models_share_a_pool_without_mixing():
    """Each request goes only to replicas of its model or adapter."""
    router = router_of(replica("r0", "a"), replica("r1", "a", "a-lora"), replica("r2", "b"))
    assert {router.place(ask(100, "a"), {}, now=0.0).replica.id for _ in range(4)} == {"r0", "r1"}
    assert {router.place(ask(100, "a-lora"), hits(r0=90), now=0.0).replica.id for _ in range(4)} == {"r1"}
    assert {router.place(ask(100, "b"), hits(r0=90), now=0.0).replica.id for _ in range(4)} == {"r2"}


def test_a_full_cache_sends_work_elsewhere():
    """Promised KV counts: a replica whose cache is promised away is avoided though nothing is pending there."""
    router = router_of("r0", "r1")
    router.fleet.set_others({ReplicaId("r0"): Promise(2, 0, 99_000), ReplicaId("r1"): Promise(2, 0, 20_000)})
    assert router.place(ask(2_000), hits(r0=500), now=0.0).replica.id == "r1"


def test_others_promises_keep_two_routers_apart():
    """Two routers that share a ledger do not both pick the replica that looked best a moment ago."""
    one, two = router_of("r0", "r1"), router_of("r0", "r1")
    one.place(ask(3_000), {}, now=0.0)
    two.fleet.set_others(one.fleet.promises())
    assert two.place(ask(3_000), {}, now=0.0).replica.id == "r1"


def test_load_past_the_routers_is_noticed_and_forgotten():
    """Requests that went to an engine directly keep ours away, until the report is old."""
    router = router_of("r0", "r1")
    router.fleet.report(ReplicaId("r0"), Load(running=64, waiting=30), now=0.0)
    assert router.place(ask(500), {}, now=1.0).replica.id == "r1"
    assert router.place(ask(500), {}, now=60.0).replica.id == "r0"


def test_a_refused_place_is_given_back_for_another():
    """When the shared ledger refuses, the next try goes elsewhere and nobody is blamed."""
    router = router_of("r0", "r1")
    lease = router.place(ask(500), hits(r0=400), now=0.0)
    lease.refuse(0.0)
    assert router.place(ask(500), hits(r0=400), now=0.0, avoid={lease.replica.id}).replica.id == "r1"
    assert router.fleet.states()[0].failures == 0


def test_a_hit_of_the_whole_prompt_still_computes_a_token():
    """An engine always computes the last token itself, and hits are never more than the prompt."""
    lease = router_of("r0").place(ask(160), hits(r0=10_000), now=0.0)
    assert (lease.placement.hit_tokens, lease.placement.miss_tokens) == (159, 1)


def test_explain_shows_every_replica_and_books_nothing():
    """Each replica's terms or its obstacle are shown, the winner first, and the winner is who would be chosen."""
    router = router_of("r0", "r1", "r2")
    router.fleet.set_draining(ReplicaId("r2"), True)
    rows = router.explain(ask(1_000), hits(r1=900, r2=990), now=0.0)
    assert [(row.placement.replica, row.is_chosen, row.obstacle) for row in rows] == [
        ("r1", True, None),
        ("r0", False, None),
        ("r2", False, "draining"),
    ]
    assert all(set(row.placement.terms) == set(TERMS) for row in rows)
    assert router.fleet.promises()[ReplicaId("r1")] == Promise()
    assert router.place(ask(1_000), hits(r1=900, r2=990), now=0.0).placement == rows[0].placement


def test_no_replica_says_why():
    """An operator reads from the error what keeps each replica out."""
    router = router_of("r0", "r1")
    router.fleet.set_health(ReplicaId("r0"), False)
    with pytest.raises(NoReplica, match=r"`m` .*\(r0: unhealthy, r1: failed this request\)") as caught:
        router.place(ask(10), {}, now=0.0, avoid=set(ids("r1")))
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)


def test_a_fleet_without_replicas_is_a_matter_of_waiting():
    """Before discovery has found anything no model is denied."""
    with pytest.raises(NoReplica):
        Router(fleet_of(), "kvroute").place(ask(10), {}, now=0.0)


def test_a_hot_prefix_gets_a_second_copy_when_waiting_costs_more():
    """The holder is kept while its wait is shorter than computing the prefix elsewhere, and not for longer."""
    router = router_of("r0", "r1")
    holder = hits(r0=3_000)
    chosen = [router.place(ask(3_500), holder, now=0.0).replica.id for _ in range(8)]
    assert chosen[:2] == ["r0", "r0"]
    assert chosen.index("r1") == 7  # computing all takes 3.7 s; a hit 0.6 s, and for each before it 0.5 s of waiting


def test_a_new_replica_is_warmed_by_cold_work():
    """Where the caches of the others are full, cold prompts go to the empty one, and conversations stay."""
    router = router_of("r0", "r1")
    for id in ids("r0 r1"):
        router.fleet.report(id, Load(prompt_tokens=100_000), now=0.0)
    router.fleet.join(replica("r2"), now=0.0)
    for turn in range(6):
        with router.place(ask(2_000), {}, now=float(turn)) as lease:
            assert lease.replica.id == "r2"
        with router.place(ask(2_000), hits(r1=1_900), now=float(turn)) as lease:
            assert lease.replica.id == "r1"


def test_an_adapter_stays_where_it_is_loaded():
    """Requests for an adapter share a replica while it is idle; the base model's go round."""
    adapter = ModelCard("a-lora", 8192, parent="a")
    router = router_of(*(with_card(replica(name, "a"), adapter) for name in ("r0", "r1")))
    assert [finished(router, "a-lora") for _ in range(4)] == ["r0"] * 4
    assert {finished(router, "a") for _ in range(4)} == {"r0", "r1"}


def with_card(whole: Replica, card: ModelCard) -> Replica:
    return replace(whole, cards=(*whole.cards, card))


def finished(router: Router, model: str) -> str:
    with router.place(ask(100, model), {}, now=0.0) as lease:
        return lease.replica.id


def test_a_copy_from_a_lower_tier_beats_computing_again():
    """2,000 tokens on r1's CPU are copied rather than computed on r0, and the price shows it."""
    router = router_of("r0", "r1")
    lease = router.place(ask(2_100), {}, now=0.0, stored=hits(r1=2_000))
    assert (lease.replica.id, lease.placement.miss_tokens) == ("r1", 100)
    assert lease.placement.terms["copy"] == pytest.approx(2_000 * ROUND.copy_token_s)


def test_an_slo_comes_before_the_cost():
    """The cheaper replica would answer in time but too slowly: with an SLO the request goes to the other."""
    for slo, expected in ((None, "r0"), (Slo(ttft_s=5.0, step_s=0.012), "r1"), (Slo(1e-6, 1e-6), "r0")):
        router = router_of("r0", "r1", slo=slo)
        router.fleet.set_others({ReplicaId("r0"): Promise(20, 0, 20_000)})
        assert router.place(ask(2_000), hits(r0=1_900), now=0.0).replica.id == expected


@given(
    st.lists(st.tuples(st.integers(1, 6_000), st.integers(0, 6_000), st.integers(0, 3), st.integers(0, 5)), max_size=60)
)
def test_placing_is_deterministic_and_optimal(requests: list[tuple[int, int, int, int]]):
    """Equal histories give equal placements, and none costs more than a tie above the cheapest."""
    twins = [router_of("r0", "r1", "r2"), router_of("r0", "r1", "r2")]
    open_: list[list[Lease]] = [[], []]
    for now, (tokens, hit, holder, settle) in enumerate(requests):
        held = {ReplicaId(f"r{holder}"): hit}
        best = min(row.placement.cost_s for row in twins[0].explain(ask(tokens), held, float(now)))
        for router, leases in zip(twins, open_, strict=True):
            lease = router.place(ask(tokens), held, float(now))
            assert lease.placement.cost_s <= best + TIE_SHARE * compute_tokens(0, tokens) * ROUND.token_s + 1e-9
            leases.append(lease)
            if settle < len(leases):
                leases.pop(settle).finish(Outcome.DONE, float(now))
        assert repr(twins[0].fleet) == repr(twins[1].fleet)


def test_switching_the_policy_keeps_the_fleet_its_leases_and_what_is_held():
    """Leases of the old policy end as usual; what it held goes by the new policy's choice; back again, all is known."""
    router = router_of(replica("a", capacity_tokens=10_000), admission=AdmissionSettings())
    first, hold, other = (router.admit(ask(8000, chain=chain(500, root=root)), {}, 0.0) for root in (1, 2, 3))
    assert isinstance(hold, Hold)
    router.switch("round-robin")
    assert router.admission is None
    assert set(router.released(1.0)) == {hold, other}
    lease = router.admit(hold.demand, {}, 1.0, hold=hold)
    assert lease.placement.policy == "round-robin"
    router.switch("kvroute", ttft_weight=0.25)
    assert router.ttft_weight == 0.25
    assert list(router.released(1.0)) == []  # the other one is held again, and there is no room
    assert [held.hold for held in router.admission.standing().held] == [other.number]
    for each in (first, lease):
        each.finish(Outcome.DONE, 2.0)
    assert router.fleet.promises()["a"].requests == 0
    assert list(router.released(2.0)) == [other]


def test_switching_to_nowhere_changes_nothing():
    """A policy that does not exist is refused, and the old one goes on."""
    router = router_of("a", policy="random")
    with pytest.raises(ConfigError, match="'best' is none of"):
        router.switch("best")
    assert router.policy == "random"
