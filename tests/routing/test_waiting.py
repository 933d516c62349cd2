"""The order of those who wait, and what tenants were served."""

from __future__ import annotations

import pytest

from kvroute.routing.conversations import Conversation
from kvroute.routing.cost import work_of
from kvroute.routing.hold import Hold
from kvroute.routing.member import Member
from kvroute.routing.rates import ModelRates
from kvroute.routing.turn import Turn
from kvroute.routing.waiting import TENANTS_MAX, Served, Ticket, Waiting
from tests.routing.builders import ROUND, ask, replica


def ticket(number: int, conversation: int, *, size_bytes: int = 10, **fields: object) -> Ticket:
    """Make a held request; the lower its conversation's number, the older is that."""
    demand = ask(100, **fields)
    turn = Turn(demand, Conversation(conversation, demand, 0, 0.0), 10.0, lambda turn, usage, now: None)
    return Ticket(Hold(number, demand, 0.0, 60.0, "full"), turn, size_bytes)


def line(*tickets: Ticket, served: Served | None = None) -> list[int]:
    """Return the numbers of holds in the order in which they leave the line."""
    waiting, order = Waiting(), []
    for each in tickets:
        waiting.add(each, at_gate=False)
    while first := waiting.first("m", served or Served()):
        waiting.remove(first.hold)
        order.append(first.hold.number)
    return order


def test_the_oldest_conversation_goes_first():
    """A conversation that came back keeps the place that its age gives it."""
    assert line(ticket(1, 30), ticket(2, 10), ticket(3, 20)) == [2, 3, 1]


def test_priority_comes_before_age():
    """Higher goes first."""
    assert line(ticket(1, 10), ticket(2, 20, priority=5), ticket(3, 30, priority=-1)) == [2, 1, 3]


def test_priority_comes_before_age_at_gates_too():
    """Of those that wait for room where they are cheapest, a higher one is asked first, then an older one."""
    waiting = Waiting()
    for each in (ticket(1, 10), ticket(2, 30, priority=5), ticket(3, 5)):
        waiting.add(each, at_gate=True)
    assert [each.hold.number for each in waiting.at_gates()] == [2, 3, 1]


def test_the_tenant_that_was_served_least_goes_first():
    """A tenant with one request is not behind a hundred of another one."""
    served = Served()
    for tenant in "ab":
        served.enter(tenant)
    served.serve("a", 1_000)
    tickets = [ticket(number, number, tenant=tenant) for number, tenant in ((1, "a"), (2, "a"), (3, "b"))]
    assert line(*tickets, served=served) == [3, 1, 2]


def test_of_those_that_are_level_the_one_goes_first_that_was_not_served_last():
    """Who has just come starts level with one that has many waiting, and is not behind them."""
    served = Served()
    served.enter("a")
    served.serve("a", 100)
    served.enter("b")
    tickets = [ticket(number, number, tenant=tenant) for number, tenant in ((1, "a"), (2, "a"), (3, "b"))]
    assert line(*tickets, served=served) == [3, 1, 2]


def test_many_requests_of_one_do_not_hide_anothers_at_a_gate():
    """Of each tenant the oldest is asked."""
    waiting = Waiting()
    for number in range(40):
        waiting.add(ticket(number, number, tenant="a"), at_gate=True)
    waiting.add(ticket(99, 99, tenant="b"), at_gate=True)
    assert [each.hold.number for each in waiting.at_gates(4)] == [0, 1, 99]
    assert len(waiting.at_gates()) == 41


def test_nobody_saves_up():
    """Who comes back after a while starts level with the least served of the others."""
    served = Served()
    for tenant in "abc":
        served.enter(tenant)
    served.leave("c")
    served.serve("a", 900)
    served.serve("b", 500)
    served.enter("c")
    assert served.of("c") == 500
    served.enter("c")
    served.leave("c")
    served.leave("c")
    assert served.busy_tenants == 2


def test_tenants_are_bounded():
    """Names that come and go do not pile up."""
    served = Served()
    for number in range(TENANTS_MAX + 10):
        served.enter(f"t{number}")
        served.leave(f"t{number}")
    assert len(served._tokens) == TENANTS_MAX


def test_lines_are_by_model_and_gates_are_beside_them():
    """A full model does not hold another one's requests; those at a gate are listed apart, the oldest first."""
    waiting = Waiting()
    a, b, c, d = ticket(1, 4, model="a"), ticket(2, 3, model="b"), ticket(3, 2), ticket(4, 1)
    for each, at_gate in ((a, False), (b, False), (c, True), (d, True)):
        waiting.add(each, at_gate=at_gate)
    assert sorted(waiting.models()) == ["a", "b"]
    assert waiting.first("a", Served()) is a
    assert waiting.first("m", Served()) is None
    assert waiting.at_gates() == [d, c]


def test_every_byte_is_given_back_and_moving_counts_once():
    """A ticket that moves from the line to a gate is still one ticket."""
    waiting, one, two = Waiting(), ticket(1, 1), ticket(2, 2, size_bytes=90)
    waiting.add(one, at_gate=False)
    waiting.add(two, at_gate=False)
    waiting.add(one, at_gate=True)
    assert (len(waiting), waiting.size_bytes, waiting.line_length("m")) == (2, 100, 1)
    assert waiting.remove(one.hold) is one
    assert waiting.remove(one.hold) is None
    waiting.remove(two.hold)
    assert (len(waiting), waiting.size_bytes, waiting.models()) == (0, 0, [])


def test_a_turn_is_over_once():
    """Later calls change nothing, whoever makes them."""
    seen: list[object] = []
    demand = ask(100)
    turn = Turn(demand, Conversation(1, demand, 0, 0.0), 10.0, lambda turn, usage, now: seen.append(usage))
    turn.over(None)
    turn.over(None)
    assert seen == [None]


@pytest.mark.parametrize("count", [1, 7])
def test_first_of_a_line_is_the_least_of_all(count: int):
    """The next is found whatever the order of arrival."""
    tickets = [ticket(number, (number * 37) % 100) for number in range(count)]
    ages = {each.hold.number: each.turn.conversation.number for each in tickets}
    assert [ages[number] for number in line(*tickets)] == sorted(ages.values())


def test_of_each_gate_only_the_oldest_are_asked():
    """However many wait, so many of each gate are looked at, in the order of all."""
    waiting = Waiting()
    gates = {}
    for number in range(1, 41):
        each = ticket(number, 100 - number)
        member = gates.setdefault(number % 2, Member(replica(f"r{number % 2}"), 1, ModelRates(ROUND)))
        each.gate = (member, work_of(0, 100, 10.0), None)
        waiting.add(each, at_gate=True)
    assert [each.hold.number for each in waiting.at_gates(2)] == [40, 39, 38, 37]
    assert len(waiting.at_gates()) == 40
    for each in waiting.at_gates():
        waiting.remove(each.hold)
    assert (len(waiting), waiting.at_gates()) == (0, [])
