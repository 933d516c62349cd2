"""Who may go and who waits, told on small pools: 10,000 tokens a replica, answers of 100 tokens."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.errors import NoReplica, Overloaded
from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.cost import Slo
from kvroute.routing.demand import Demand, Outcome, Promise, Usage
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, hits, replica, router_of

PROMPT = 3_008  # tokens, 188 blocks: three fit, four do not


def pool(*names: str, **options: object) -> Router:
    """Make a router that holds, over replicas of 10,000 tokens."""
    given = AdmissionSettings(**options)
    return router_of(*(replica(name, capacity_tokens=10_000) for name in names or ("r0",)), admission=given)


def turn(root: int, tokens: int = PROMPT, **fields: object) -> Demand:
    """Make a turn of the conversation that a root names; a longer one goes on with a shorter one."""
    return ask(tokens, chain=chain(tokens // 16, root=root), **fields)


def booked(router: Router, demand: Demand, now: float = 0.0, **held: int) -> Lease:
    answer = router.admit(demand, hits(**held), now)
    assert isinstance(answer, Lease)
    return answer


def waits(router: Router, demand: Demand, now: float = 0.0, **held: int) -> Hold:
    answer = router.admit(demand, hits(**held), now)
    assert isinstance(answer, Hold)
    return answer


def done(lease: Lease, now: float, prompt: int = PROMPT, cached: int = 0) -> None:
    lease.began(now)
    lease.finish(Outcome.DONE, now, Usage(prompt, 100, cached))


def test_nothing_is_held_while_everything_fits():
    """Where memory is enough, admission chooses as placing does."""
    one, two = pool("r0", "r1"), router_of("r0", "r1")
    for root in range(4):
        assert booked(one, turn(root, 1_008)).replica.id == two.place(turn(root, 1_008), {}, 0.0).replica.id
    assert list(one.released(1.0)) == []


def test_paced_traffic_goes_round_here_too():
    """Where costs are equal and nothing is in flight, the least recently chosen is next."""
    router, chosen = pool("r0", "r1"), []
    for root in range(4):
        lease = booked(router, turn(root, 1_008), float(root))
        done(lease, root + 0.5, 1_008)
        chosen.append(lease.replica.id)
    assert chosen == ["r0", "r1", "r0", "r1"]


def test_a_new_conversation_waits_where_its_prefix_lies_and_blocks_nobody():
    """Its 1,900 cached tokens are on a replica whose only slot is taken: it waits there, and others go elsewhere."""
    router = router_of(replica("r0", max_num_seqs=1), "r1", admission=AdmissionSettings())
    first = booked(router, turn(1, 1_008), r0=900)
    hold = waits(router, turn(2, 2_000), 0.0, r0=1_900)
    assert booked(router, turn(3, 3_008)).replica.id == "r1"
    assert router.admit(hold.demand, hits(r0=1_900), 1.0, hold=hold) is hold
    first.finish(Outcome.DONE, 2.0)
    assert list(router.released(2.0)) == [hold]


def test_an_slo_comes_before_the_cost_here_too():
    """The cheaper replica would answer too slowly: with an SLO the request goes to the other, held or not."""
    for slo, expected in ((None, "r0"), (Slo(ttft_s=5.0, step_s=0.012), "r1"), (Slo(1e-6, 1e-6), "r0")):
        router = router_of("r0", "r1", slo=slo, admission=AdmissionSettings())
        router.fleet.set_others({ReplicaId("r0"): Promise(20, 0, 20_000)})
        assert booked(router, ask(2_000), r0=1_900).replica.id == expected


def test_without_settings_nothing_is_ever_held():
    """Admission is off unless it is asked for, and for other policies."""
    router = router_of(replica("r0", capacity_tokens=10_000))
    assert all(isinstance(router.admit(turn(root), {}, 0.0), Lease) for root in range(20))


def test_a_prompt_that_does_not_fit_waits_for_one_that_ends():
    """Three prompts of 3,008 tokens and their answers fill the pool; the fourth goes when one of them is over."""
    router = pool()
    leases = [booked(router, turn(root, sequences=1)) for root in range(2)]
    hold = waits(router, turn(9, 5_008))
    assert list(router.released(1.0)) == []
    leases[0].finish(Outcome.DONE, 2.0)
    leases[1].finish(Outcome.DONE, 2.0)
    assert list(router.released(200.0)) == [hold]
    assert isinstance(router.admit(hold.demand, {}, 200.0, hold=hold), Lease)
    assert list(router.released(200.0)) == []


def test_a_held_request_is_bound_at_the_last_moment():
    """It goes to the replica that has room and its prefix when it is released, not to the one that had it before."""
    router = pool("r0", "r1")
    first = [booked(router, turn(root, 8_000), r0=0) for root in (1, 2)]
    hold = waits(router, turn(3, 5_008), r0=4_000)
    first[1].finish(Outcome.DONE, 5.0)
    assert list(router.released(300.0)) == [hold]
    lease = router.admit(hold.demand, hits(r1=4_000), 300.0, hold=hold)
    assert isinstance(lease, Lease)
    assert lease.replica.id == first[1].replica.id


def test_a_conversation_that_lives_goes_on_while_new_ones_wait():
    """Its next turn passes those in line: it holds its memory already."""
    router = pool()
    mine = booked(router, turn(1, 4_000))
    other = booked(router, turn(2, 3_008))
    hold = waits(router, turn(3, 4_000))
    done(mine, 1.0, 4_000)
    again = booked(router, turn(1, 4_208), 1.5, r0=4_096)
    assert again.replica.id == "r0"
    assert list(router.released(2.0)) == []
    again.finish(Outcome.DONE, 3.0)
    other.finish(Outcome.DONE, 3.0)
    assert list(router.released(500.0)) == [hold]


def test_the_line_keeps_its_order():
    """Who came first goes first, and a small request does not slip past a large one."""
    router = pool()
    lease = booked(router, turn(1, 8_000))
    large, small = waits(router, turn(2, 6_000)), waits(router, turn(3, 1_008))
    lease.finish(Outcome.DONE, 1.0)
    order = []
    for hold in router.released(500.0):
        order.append(hold)
        assert isinstance(router.admit(hold.demand, {}, 500.0, hold=hold), Lease)
    assert order == [large, small]


def test_a_prompt_that_is_cached_needs_no_room():
    """A conversation that was silent for long, and one that shares its prompt, go at once where four fifths lie."""
    router = pool()
    for root in (1, 2):
        booked(router, turn(root))
    waits(router, turn(3), r0=2_300)
    for root in (4, 5):
        answer = router.admit(turn(root, 1_504), hits(r0=1_216), 0.0)
        assert isinstance(answer, Lease)
        answer.finish(Outcome.DONE, 0.0)


def test_an_idle_replica_takes_anybody():
    """However much is reserved, nobody waits while a replica has nothing to do."""
    router = pool()
    for root in range(6):
        done(booked(router, turn(root), float(root)), float(root))
    booked(router, turn(99, 8_000), 6.0)


def test_a_request_that_waited_too_long_is_refused_with_a_time_to_come_back():
    """The bound is the setting's; the error is a 429 and says when to try again."""
    router = pool(hold_s=30.0)
    booked(router, turn(1, 8_000))
    hold = waits(router, turn(2))
    assert hold.until_s == 30.0
    assert router.admit(hold.demand, {}, 29.0, hold=hold) is hold
    with pytest.raises(Overloaded, match="waited for 30 s") as caught:
        router.admit(hold.demand, {}, 30.0, hold=hold)
    assert (caught.value.status, caught.value.retry_after_s) == (429, 1.0)
    assert router.admission is not None
    assert len(router.admission.waiting) == 0


def test_holds_are_bounded_in_number_and_bytes():
    """What is over a bound is refused at once, and a dropped hold makes room for another."""
    router = pool(holds_max=2)
    booked(router, turn(1, 8_000))
    hold = waits(router, turn(2))
    waits(router, turn(3))
    with pytest.raises(Overloaded, match="2 requests wait already"):
        router.admit(turn(4), {}, 0.0)
    router.drop(hold, 1.0)
    waits(router, turn(5))
    small = pool(hold_bytes_max=1_000_000)
    booked(small, turn(1, 8_000))
    assert isinstance(small.admit(turn(2), {}, 0.0, size_bytes=600_000), Hold)
    with pytest.raises(Overloaded):
        small.admit(turn(3), {}, 0.0, size_bytes=600_000)


def test_a_client_that_leaves_the_line_is_forgotten():
    """Dropping is final, and dropping again changes nothing."""
    router = pool()
    lease = booked(router, turn(1, 8_000))
    hold = waits(router, turn(2))
    router.drop(hold, 1.0)
    router.drop(hold, 1.0)
    lease.finish(Outcome.DONE, 2.0)
    assert list(router.released(500.0)) == []


def test_a_hold_is_named_once():
    """A driver that is slow to admit does not see the same hold again until it has asked about it."""
    router = pool()
    lease = booked(router, turn(1, 8_000))
    hold = waits(router, turn(2))
    lease.finish(Outcome.DONE, 1.0)
    assert list(router.released(500.0)) == [hold]
    assert list(router.released(500.0)) == []
    assert isinstance(router.admit(hold.demand, {}, 500.0, hold=hold), Lease)


def test_priority_goes_first():
    """Of two that wait the one of higher priority is released first, though it came later."""
    router = pool()
    lease = booked(router, turn(1, 8_000))
    waits(router, turn(2, 6_000))
    urgent = waits(router, turn(3, 6_000, priority=1))
    lease.finish(Outcome.DONE, 1.0)
    assert next(iter(router.released(500.0))) is urgent


def test_a_tenant_that_was_served_less_goes_first():
    """A tenant whose conversations fill the pool waits behind one that has none there."""
    router = pool()
    heavy = booked(router, turn(1, 8_000, tenant="heavy"))
    waits(router, turn(2, 6_000, tenant="heavy"))
    light = waits(router, turn(3, 6_000, tenant="light"))
    done(heavy, 1.0, 8_000)
    assert next(iter(router.released(500.0))) is light


def test_a_full_model_does_not_hold_another_one():
    """Lines are by model: requests for one with room do not wait behind those for one without."""
    admission = AdmissionSettings()
    router = router_of(
        replica("r0", "a", capacity_tokens=10_000), replica("r1", "b", capacity_tokens=10_000), admission=admission
    )
    for model in ("a", "a"):
        router.admit(turn(1 if model == "a" else 2, 6_000, model=model), {}, 0.0)
    assert isinstance(router.admit(turn(7, 6_000, model="a"), {}, 0.0), Hold)
    assert isinstance(router.admit(turn(8, 6_000, model="b"), {}, 0.0), Lease)


def test_the_youngest_leaves_where_more_live_than_fit():
    """Three conversations that grew over the pool: the oldest go on, the last one waits in line at its next turn."""
    router = pool()
    now = 0.0
    for tokens in (1_008, 2_000, 3_008):
        for root in (1, 2, 3):
            now += 0.1
            done(booked(router, turn(root, tokens), now, r0=max(tokens - 1_000, 0)), now, tokens, tokens - 1_000)
    grown = [router.admit(turn(root, 3_200), hits(r0=3_100), now + 0.1) for root in (1, 2)]
    assert all(isinstance(each, Lease) for each in grown)
    assert isinstance(router.admit(turn(3, 3_200), hits(r0=3_100), now + 0.1), Hold)


def crowd(router: Router, count: int = 12) -> float:
    """Let conversations of 1,008 tokens come, answer and pause, one after the other: 10,000 tokens cannot keep all."""
    for root in range(count):
        done(booked(router, turn(root, 1_008), root / 100), root / 100, 1_008)
    return count / 100


def test_reservations_alone_hold_nobody():
    """Whatever pausing conversations may come to hold: little is promised and nothing was lost, so all go at once."""
    router = pool()
    now = crowd(router)
    assert router.admission is not None
    assert router.admission.standing().live[0].peak_tokens > 10_000
    booked(router, turn(98, 1_008), now)
    booked(router, turn(99, 1_008), now)


def test_once_caches_were_lost_reservations_count():
    """The same crowd, after one of them came back and found nothing: who is new waits, though little is promised."""
    router = pool()
    now = crowd(router)
    booked(router, turn(0, 1_200), now)
    waits(router, turn(99, 1_008), now)


def test_nothing_is_kept_for_prompts_that_do_not_come_back():
    """After a few dozen single requests no room is reserved between turns, whatever was assumed to begin with."""
    router = pool()
    for root in range(40):
        done(booked(router, turn(root, 1_008), 10.0 * root), 10.0 * root + 1, 1_008)
    assert router.admission is not None
    assert router.admission.memory_s("m") == 0.0


def test_a_cache_that_is_there_is_not_lost():
    """Coming back and being placed elsewhere, because its own replica is busy, says nothing of evictions."""
    router = pool("r0", "r1")
    home = booked(router, turn(1, 1_008))
    done(home, 0.1, 1_008)
    router.fleet.set_others({home.replica.id: Promise(20, 9_000, 9_000)})
    again = booked(router, turn(1, 1_200), 0.2, **{home.replica.id: 1_104})  # and a part of a block
    assert again.replica.id != home.replica.id
    assert router.admission is not None
    assert router.admission.pressure.lost == 0.0


def test_room_goes_to_who_waited_for_it_there():
    """Each of two waits for the slot of the replica that holds its prompt; the older one's is still taken."""
    router = router_of(replica("r0", max_num_seqs=1), replica("r1", max_num_seqs=1), admission=AdmissionSettings())
    booked(router, turn(1), r0=2_900)
    running = booked(router, turn(2), r1=2_900)
    older, younger = waits(router, turn(3), r0=2_900), waits(router, turn(4), r1=2_900)
    running.finish(Outcome.DONE, 0.5)
    assert list(router.released(0.5)) == [younger]
    assert isinstance(router.admit(younger.demand, hits(r1=2_900), 0.5, hold=younger), Lease)
    assert router.admission is not None
    assert router.admission.waiting.all()[0].hold is older


def test_who_waits_at_a_gate_hears_of_other_room_within_a_second():
    """The replica that was cheapest stays full; another one that comes is found although that gate never opened."""
    router = pool()
    booked(router, turn(1, 8_000))
    hold = waits(router, turn(2, 3_008), r0=2_900)
    router.fleet.join(replica("r1", capacity_tokens=10_000), 0.1)
    assert list(router.released(0.2)) == []
    assert list(router.released(1.1)) == [hold]


steps = st.tuples(
    st.sampled_from(["ask", "ask", "end", "fail", "leave", "drop", "down", "up", "gone", "join"]),
    st.integers(0, 7),
    st.integers(1, 8_000),
)


class Driver:
    """Plays requests against a router as a proxy does: keeps holds, admits what is released, hears of failures."""

    def __init__(self) -> None:
        self.router = pool("r0", "r1", hold_s=60.0, holds_max=50)
        self.now = 0.0
        self.leases: list[Lease] = []
        self.holds: list[Hold] = []

    def ask(self, demand: Demand, hold: Hold | None = None) -> None:
        if hold is not None:
            self.holds.remove(hold)
        try:
            answer = self.router.admit(demand, {}, self.now, hold=hold)
        except (Overloaded, NoReplica):
            return
        if isinstance(answer, Lease):
            self.leases.append(answer)
        else:
            self.holds.append(answer)

    def play(self, what: str, which: int, tokens: int) -> None:
        self.now += 0.5
        id = ReplicaId(f"r{which % 2}")
        if what == "ask":
            self.ask(turn(which, tokens))
        elif what in {"end", "fail", "leave"} and self.leases:
            lease = self.leases.pop(which % len(self.leases))
            outcome = {"end": Outcome.DONE, "fail": Outcome.FAILED, "leave": Outcome.ABANDONED}[what]
            lease.finish(outcome, self.now, Usage(tokens, 10, 0) if what == "end" else None)
        elif what == "drop" and self.holds:
            self.router.drop(self.holds.pop(which % len(self.holds)), self.now)
        elif what in {"down", "up"}:
            self.router.fleet.set_health(id, what == "up")
        elif what == "gone":
            self.router.fleet.leave(id)
        elif what == "join":
            self.router.fleet.join(replica(id, capacity_tokens=10_000), self.now)
        self.tick()

    def tick(self) -> None:
        for hold in [each for each in self.holds if each.until_s <= self.now]:
            self.ask(hold.demand, hold)
        for hold in self.router.released(self.now):
            self.ask(hold.demand, hold)


@settings(deadline=None, max_examples=60)
@given(st.lists(steps, max_size=60))
def test_every_held_request_ends_whatever_happens(happenings: list[tuple[str, int, int]]):
    """Replicas fail, leave and come back, clients leave: by its deadline every request has gone or was refused."""
    driver = Driver()
    for happening in happenings:
        driver.play(*happening)
    for _ in range(130):
        driver.now += 0.5
        driver.tick()
    assert driver.holds == []
    admission = driver.router.admission
    assert admission is not None
    assert (len(admission.waiting), admission.waiting.size_bytes) == (0, 0)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers(100, 8_000)), min_size=1, max_size=30))
def test_all_are_served_once_others_end(requests: list[tuple[int, int]]):
    """Without a bound on the wait, ending what runs is enough to let everybody go, one after the other."""
    driver = Driver()
    driver.router = pool("r0", "r1", hold_s=1e9)
    for root, tokens in requests:
        driver.ask(turn(root, tokens))
    for _ in range(len(requests) + 1):
        if driver.leases:
            driver.now += 1.0
            driver.leases.pop(0).finish(Outcome.DONE, driver.now, Usage(1_000, 10, 0))
        driver.now += 1_000.0
        driver.tick()
    assert driver.holds == []
