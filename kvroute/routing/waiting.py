"""The requests that are held, in the order in which they should go.

Those at a gate, for whose conversation there is a place and no room to run yet, come first; each waits for itself. The
others wait in one line for each model: by priority, then by what their tenants were served (least first), then by the
conversation's age, so that the oldest keep their place. A tenant is served what it makes engines do: computed and
generated tokens count whole, cached ones a tenth; they count when a request goes, as they are expected then. One that
had nothing to ask for meanwhile cannot save up: it starts level with the least served of those that wait or run, and
goes before it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from typing import TypeVar

from kvroute.routing.cost import Work
from kvroute.routing.demand import Prefix
from kvroute.routing.hold import Hold
from kvroute.routing.member import Member
from kvroute.routing.replica import ReplicaId
from kvroute.routing.turn import Turn

CACHED_SHARE = 0.1  # what a cached token counts for
TENANTS_MAX = 4096
Key = TypeVar("Key")


class Ticket:
    """A held request."""

    __slots__ = ("at_gate", "gate", "hits", "hold", "is_woken", "looked_s", "queue_of", "size_bytes", "turn")

    def __init__(self, hold: Hold, turn: Turn, size_bytes: int) -> None:
        self.hold = hold
        self.turn = turn
        self.size_bytes = size_bytes
        self.hits: Mapping[ReplicaId, int] = {}  # what the index knew when it was last asked
        self.at_gate = False  # it waits for room where it is cheapest; else in line
        self.gate: tuple[Member, Work, Prefix | None] | None = None  # what it waits for there
        self.queue_of: ReplicaId | None = None  # whose gate's queue it stands in
        self.looked_s = hold.since_s  # when it was last asked about
        self.is_woken = False  # it was named as released and has not come back yet


class Served:
    """What tenants were served, in tokens; only differences mean something. Bounded: the longest unused goes."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, float] = OrderedDict()
        self._busy: dict[str, int] = {}  # requests that wait or run
        self._last: dict[str, int] = {}  # number of the last charge
        self._charges = 0

    def of(self, tenant: str) -> float:
        """Return what a tenant was served."""
        return self._tokens.get(tenant, 0.0)

    def level(self, tenant: str) -> float:
        """Return what a tenant counts as served; one that has no request is level with the least served that has."""
        if tenant in self._busy:
            return self.of(tenant)
        return max(self.of(tenant), min(map(self.of, self._busy), default=0.0))

    def enter(self, tenant: str) -> None:
        """Note that a tenant has a request; if it had none, level it with the least served of the others."""
        if not self._busy.get(tenant):
            self._tokens[tenant] = self.level(tenant)
            self._tokens.move_to_end(tenant)
            while len(self._tokens) > TENANTS_MAX:
                self._last.pop(self._tokens.popitem(last=False)[0], None)
        self._busy[tenant] = self._busy.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Note that a request is over."""
        left = self._busy.get(tenant, 0) - 1
        if left > 0:
            self._busy[tenant] = left
        else:
            self._busy.pop(tenant, None)

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge a tenant; less than nothing gives back what was expected and did not come."""
        if tenant in self._tokens:
            self._tokens[tenant] += tokens
            self._charges += 1
            self._last[tenant] = self._charges

    def last(self, tenant: str) -> int:
        """Return when a tenant was charged last, in charges; 0 = not since it is known."""
        return self._last.get(tenant, 0)

    @property
    def busy_tenants(self) -> int:
        """How many tenants have requests."""
        return len(self._busy)


class Queue:
    """Tickets by priority, then by the conversation's age. Asking for the first ones does not look at the others."""

    __slots__ = ("_keys", "_tickets")

    def __init__(self) -> None:
        self._keys: list[tuple[int, int, int]] = []
        self._tickets: list[Ticket] = []

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, ticket: Ticket) -> None:
        """Put a ticket in its place."""
        key = key_of(ticket)
        at = bisect_left(self._keys, key)
        self._keys.insert(at, key)
        self._tickets.insert(at, ticket)

    def remove(self, ticket: Ticket) -> None:
        """Take a ticket out that is there."""
        at = bisect_left(self._keys, key_of(ticket))
        del self._keys[at], self._tickets[at]

    def first(self, count: int) -> list[Ticket]:
        """Return the first ones."""
        return self._tickets[:count]


def key_of(ticket: Ticket) -> tuple[int, int, int]:
    """Return what tickets of one queue are ordered by; none of it changes while one waits."""
    return (-ticket.turn.demand.priority, ticket.turn.conversation.number, ticket.hold.number)


LineKey = tuple[int, str]  # priority and tenant


class Waiting:
    """Tickets by number, and the queues that they stand in: one for each tenant of a gate or a line."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._tickets: dict[int, Ticket] = {}
        self._gates: dict[ReplicaId | None, dict[LineKey, Queue]] = {}
        self._lines: dict[str, dict[LineKey, Queue]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket, *, at_gate: bool) -> None:
        """Let a request wait, or wait elsewhere from now on."""
        self.remove(ticket.hold)
        ticket.at_gate, ticket.queue_of = at_gate, None if ticket.gate is None else ticket.gate[0].replica.id
        self._tickets[ticket.hold.number] = ticket
        self.size_bytes += ticket.size_bytes
        if at_gate:
            queues = self._gates.setdefault(ticket.queue_of, {})
        else:
            queues = self._lines.setdefault(ticket.hold.demand.model, {})
        queues.setdefault(line_key(ticket), Queue()).add(ticket)

    def remove(self, hold: Hold) -> Ticket | None:
        """Let a request wait no longer."""
        ticket = self._tickets.pop(hold.number, None)
        if ticket is None:
            return None
        self.size_bytes -= ticket.size_bytes
        if ticket.at_gate:
            take_out(self._gates, ticket.queue_of, ticket)
        else:
            take_out(self._lines, hold.demand.model, ticket)
        return ticket

    def get(self, hold: Hold) -> Ticket | None:
        """Return a hold's ticket, None where it does not wait here."""
        return self._tickets.get(hold.number)

    def all(self) -> list[Ticket]:
        """Return everybody who waits, in the order of arrival."""
        return [self._tickets[number] for number in sorted(self._tickets)]

    def at_gates(self, most: int | None = None) -> list[Ticket]:
        """Return those that wait for room where they are cheapest: by priority, then the oldest conversation first.

        Args:
            most: of each gate, so many, and one of each tenant at least; None = all.
        """
        found = []
        for queues in self._gates.values():
            each = None if most is None else max(most // len(queues), 1)
            for queue in queues.values():
                found += queue.first(len(queue) if each is None else each)
        return sorted(found, key=key_of)

    def models(self) -> list[str]:
        """Return the models for which a line waits."""
        return list(self._lines)

    def first(self, model: str, served: Served) -> Ticket | None:
        """Return who is next in a model's line."""
        line = self._lines.get(model)
        if not line:
            return None
        return min((queue.first(1)[0] for queue in line.values()), key=lambda ticket: rank(ticket.turn, served))

    def line(self, model: str, served: Served) -> list[Ticket]:
        """Return those who wait in a model's line, the next one first."""
        queues = self._lines.get(model, {}).values()
        everybody = [ticket for queue in queues for ticket in queue.first(len(queue))]
        return sorted(everybody, key=lambda ticket: rank(ticket.turn, served))

    def line_length(self, model: str) -> int:
        """Return how many wait in a model's line."""
        return sum(map(len, self._lines.get(model, {}).values()))


def line_key(ticket: Ticket) -> LineKey:
    """Return whose place in its line depends on the same figures."""
    return (ticket.turn.demand.priority, ticket.turn.conversation.tenant)


def take_out(places: dict[Key, dict[LineKey, Queue]], place: Key, ticket: Ticket) -> None:
    """Take a ticket out of its queue, and away what is empty then."""
    queues, key = places[place], line_key(ticket)
    queues[key].remove(ticket)
    if not queues[key]:
        del queues[key]
    if not queues:
        del places[place]


def rank(turn: Turn, served: Served) -> tuple[float, float, int, int]:
    """Return where a request stands in its line; the least goes first."""
    conversation, tenant = turn.conversation, turn.conversation.tenant
    return (-turn.demand.priority, served.level(tenant), served.last(tenant), conversation.number)
