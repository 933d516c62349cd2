"""What people are shown of holding: who waits, who lives where, and what a request would be told."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Outcome, Usage
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.replica import ReplicaId
from kvroute.routing.router import Router
from tests.routing.builders import ask, chain, replica, router_of

NONE: dict[str, int] = {}


def small_pool(**bounds: object) -> Router:
    """Make a router over one replica of 10,000 tokens."""
    return router_of(replica("a", capacity_tokens=10_000), admission=AdmissionSettings(**bounds))


def turn(root: int, blocks: int = 250, **fields: object):
    """Make a turn of a conversation of its own."""
    return ask(blocks * 16, chain=chain(blocks, root=root), **fields)


def test_who_waits_is_listed_with_its_place_in_line():
    """The oldest comes first and is next; each row says whose it is, for how long it waited and how long it may."""
    router = small_pool(hold_s=60.0)
    router.admit(turn(1), {}, 0.0)
    router.admit(turn(2), {}, 1.0)
    for number, tenant in ((3, "x"), (4, "y")):
        assert isinstance(router.admit(turn(number, tenant=tenant), {}, float(number)), Hold)
    router.admission.advance(10.0)
    rows = router.admission.standing().held
    assert [(row.tenant, row.position, row.waited_s, row.left_s) for row in rows] == [
        ("x", 1, 7.0, 53.0),
        ("y", 2, 6.0, 54.0),
    ]
    assert [(row.turn, row.prompt_tokens, row.model) for row in rows] == [(1, 4000, "m")] * 2


def test_the_working_set_is_summed_by_replica():
    """Live conversations count where they are, those under way apart from those that pause."""
    router = small_pool()
    lease = router.admit(turn(1, 100), {}, 0.0)
    router.admit(turn(2, 100), {}, 0.0)
    lease.finish(Outcome.DONE, 1.0, Usage(1600, 100))
    (row,) = router.admission.standing().live
    assert (row.replica, row.conversations, row.under_way, row.capacity_tokens) == ("a", 2, 1, 10_000)
    assert 0 < row.now_tokens <= row.peak_tokens
    assert row.limit_tokens == round(router.admission.pressure.fill * 10_000)


def test_what_was_learnt_of_a_model():
    """After a second turn its growth, and how long the pause was, are shown."""
    router = small_pool()
    router.admit(turn(1, 100), {}, 0.0).finish(Outcome.DONE, 1.0, Usage(1600, 64))
    router.admit(turn(1, 120), {}, 4.0)
    (row,) = router.admission.standing().learnt
    assert (row.model, row.turns_seen, row.output_tokens) == ("m", 1, 64.0)
    assert row.pauses_s[0] >= 3.0
    assert row.memory_s > 0


def foresee(router: Router, demand, now_s: float = 5.0):
    return router.foresee(demand, {}, now_s)


def test_where_there_is_room_a_request_would_go():
    """An idle pool holds nobody; the conversation would be a new one."""
    seen = foresee(small_pool(), turn(1))
    assert (seen.replica, seen.rule, seen.conversation, seen.turn) == ("a", "none", None, 1)
    assert (seen.rooms[0].has_seat, seen.rooms[0].is_open) == (True, True)


def test_a_later_turn_is_recognised():
    """A prompt that extends one that was answered would be that conversation's second turn."""
    router = small_pool()
    router.admit(turn(1, 100), {}, 0.0).finish(Outcome.DONE, 1.0, Usage(1600, 64))
    seen = foresee(router, turn(1, 120))
    assert (seen.conversation, seen.turn) == (1, 2)


def test_a_request_that_would_be_held_is_told_by_which_rule():
    """Beside two conversations that fill the pool, a third has no seat; behind one that waits, it is in line."""
    router = small_pool()
    for root in (1, 2):
        assert isinstance(router.admit(turn(root), {}, 0.0), Lease)
    seen = foresee(router, turn(3))
    assert (seen.replica, seen.rule, seen.ahead) == (None, "working set", 0)
    room = seen.rooms[0]
    assert room.peak_tokens > room.peak_limit_tokens
    router.admit(turn(3), {}, 1.0)
    seen = foresee(router, turn(4))
    assert (seen.rule, seen.ahead) == ("line", 1)


def test_a_priority_passes_the_line():
    """A request of higher priority would go before those that wait, and so it is shown."""
    router = small_pool()
    for root in (1, 2, 3):
        router.admit(turn(root), {}, 0.0)
    assert foresee(router, turn(4, priority=1)).ahead == 0


def test_a_turn_without_room_where_it_lives_would_wait_at_the_gate():
    """A conversation that has its seat, and whose replica is full of others, waits for room there."""
    router = router_of(replica("a", capacity_tokens=100_000, max_num_seqs=1), admission=AdmissionSettings())
    router.admit(turn(1, 100), {}, 0.0).finish(Outcome.DONE, 1.0, Usage(1600, 64))
    router.admit(turn(2, 100), {}, 1.0)
    seen = foresee(router, turn(1, 120), 2.0)
    assert (seen.replica, seen.rule, seen.rooms[0].has_seat, seen.rooms[0].is_open) == (None, "gate", True, False)


def test_looking_changes_nothing():
    """However often somebody looks, the next requests get what they would have got."""
    router, other = small_pool(), small_pool()
    for root in (1, 2, 3, 1, 4):
        for _ in range(3):
            foresee(router, turn(root, tenant=f"t{root}"), 0.0)
        found = router.admit(turn(root, tenant=f"t{root}"), {}, 0.0)
        assert type(found) is type(other.admit(turn(root, tenant=f"t{root}"), {}, 0.0))
    assert router.admission.standing() == other.admission.standing()
    assert repr(router.fleet) == repr(other.fleet)
    assert router.explain(turn(9), {}, 0.0) == other.explain(turn(9), {}, 0.0)


@settings(deadline=None, max_examples=150)
@given(
    st.lists(
        st.tuples(
            st.integers(1, 250),  # blocks
            st.integers(0, 250),  # of these, blocks that a replica holds
            st.sampled_from(["x", "y"]),  # tenant
            st.integers(-1, 1),  # priority
            st.integers(0, 3),  # leases that end before
            st.sampled_from([0.0, 0.1, 3.0]),  # time that passes before
        ),
        max_size=40,
    )
)
def test_what_is_foreseen_comes_true(requests):
    """Whatever has gone before, a new conversation is placed where it was foreseen, or held for the reason foreseen.

    A later turn is not compared: it teaches what turns add before it is decided about, which is not foreseen.
    """
    router = router_of(*(replica(name, capacity_tokens=6_000) for name in "abc"), admission=AdmissionSettings())
    leases, now_s = [], 0.0
    for root, (blocks, held, tenant, priority, ends, passed_s) in enumerate(requests):
        now_s += passed_s
        for lease in leases[:ends]:
            lease.finish(Outcome.DONE, now_s, Usage(1, 100))
        del leases[:ends]
        demand = turn(root, blocks, tenant=tenant, priority=priority)
        known = {ReplicaId("abc"[root % 3]): min(held, blocks) * 16}
        seen = router.foresee(demand, known, now_s)
        found = router.admit(demand, known, now_s)
        if isinstance(found, Hold):
            assert (seen.replica, seen.reason) == (None, found.reason)
        else:
            assert (seen.replica, seen.rule) == (found.replica.id, "none")
            leases.append(found)
