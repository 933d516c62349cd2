"""Routers of a simulation, and what they tell each other."""

from __future__ import annotations

from random import Random

from kvroute.routing.admission import AdmissionSettings
from kvroute.routing.demand import Demand, Outcome, Promise
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.sim.simulation_knowledge import ExactView
from kvroute.sim.simulation_routers import Front, exchange, id_of, is_confirmed, number_of, plus, replica_of
from kvroute.sim.simulation_settings import RouterSettings
from tests.sim.fleets import BLOCK, engine


def front_of(replicas=2, kv_tokens=100_000, **settings):
    ids = [id_of(n) for n in range(replicas)]
    front = Front(RouterSettings(**{"admission": None, **settings}), engine(kv_tokens), ExactView(ids), Random(1))
    for number in range(replicas):
        front.fleet.join(replica_of(number, engine(kv_tokens)), 0.0)
    return front


def ask(tokens):
    return Demand(model="m", prompt_tokens=tokens, longest_prompt=tokens, block_size=BLOCK)


def place(front, tokens, *fronts):
    lease = front.place(ask(tokens), 0.0, frozenset(), None, fronts or (front,))
    assert isinstance(lease, Lease)
    return lease


def test_replicas_are_named_by_number():
    """A name tells the number, and a replica says what its cache holds."""
    assert number_of(id_of(12)) == 12
    assert (replica_of(3, engine(1600)).id, replica_of(3, engine(1600)).usable_tokens) == ("r3", 1600)


def test_routers_know_what_others_promised_after_an_exchange():
    """An exchange carries absolute figures: the second one replaces the first, and an end takes them back."""
    one, other = front_of(), front_of()
    lease = place(one, 5000)
    for _ in range(2):
        exchange(one, (one, other), 0.0)
    promised = one.fleet.promises()[lease.replica.id]
    assert other.others[lease.replica.id] == promised
    assert place(other, 5000).replica.id != lease.replica.id
    lease.finish(Outcome.DONE, 1.0)
    exchange(one, (one, other), 0.0)
    assert other.others[lease.replica.id] == Promise()


def test_a_lost_exchange_is_made_good_by_the_next():
    """What was promised twice since the last write is known in full after one."""
    one, other = front_of(1), front_of(1)
    place(one, 1000)
    place(one, 2000)
    exchange(one, (one, other), 0.0)
    assert other.others["r0"].requests == 2


def test_a_booking_over_what_all_promised_is_placed_elsewhere():
    """Where another router's promises leave no room, kvroute's booking is refused and made on the other replica."""
    one, other = front_of(2, 10_000), front_of(2, 10_000)
    first = place(one, 8000, one, other)
    second = place(other, 8000, one, other)
    assert {first.replica.id, second.replica.id} == {"r0", "r1"}
    assert not is_confirmed(place(one, 8000), (one, other))


def test_where_all_are_full_the_first_choice_stands():
    """A request is not refused for memory alone: the engine queues it."""
    front = front_of(2, 10_000)
    leases = [place(front, 8000) for _ in range(4)]
    assert sorted(lease.replica.id for lease in leases) == ["r0", "r0", "r1", "r1"]


def test_kvroute_may_hold_instead():
    """With admission, what does not fit waits at the router."""
    front = front_of(2, 10_000, admission=AdmissionSettings())
    found = [front.place(ask(8000), 0.0, frozenset(), None, (front,)) for _ in range(3)]
    assert [type(each) for each in found] == [Lease, Lease, Hold]


def test_sums_replace_parts():
    """A part of a sum is replaced by its new value."""
    assert plus(Promise(3, 30, 300), Promise(2, 20, 200), Promise(1, 10, 100)) == Promise(4, 40, 400)
    assert plus(None, Promise(1, 1, 1), None) == Promise(1, 1, 1)
