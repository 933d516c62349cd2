"""The requests that are held, in the order in which they should go.

Those at a gate, for whose conversation there is a place and no room to run yet, come first; each waits for itself. The
others wait in one line for each model: by priority, then by what their tenants were served (least first), then by the
conversation's age, so that the oldest keep their place. A tenant is served what it makes engines do: computed and
generated tokens count whole, cached ones a tenth. One that had nothing to ask for meanwhile cannot save up: it starts
level with the least served of those that wait or run.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping

from kvroute.routing.cost import Work
from kvroute.routing.demand import Prefix
from kvroute.routing.hold import Hold
from kvroute.routing.member import Member
from kvroute.routing.replica import ReplicaId
from kvroute.routing.turn import Turn

CACHED_SHARE = 0.1  # what a cached token counts for
TENANTS_MAX = 4096


class Ticket:
    """A held request."""

    __slots__ = ("at_gate", "gate", "hits", "hold", "is_woken", "looked_s", "size_bytes", "turn")

    def __init__(self, hold: Hold, turn: Turn, size_bytes: int) -> None:
        self.hold = hold
        self.turn = turn
        self.size_bytes = size_bytes
        self.hits: Mapping[ReplicaId, int] = {}  # what the index knew when it was last asked
        self.at_gate = False  # it waits for room where it is cheapest; else in line
        self.gate: tuple[Member, Work, Prefix | None] | None = None  # what it waits for there
        self.looked_s = hold.since_s  # when it was last asked about
        self.is_woken = False  # it was named as released and has not come back yet


class Served:
    """What tenants were served, in tokens; only differences mean something. Bounded: the longest unused goes."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[str, float] = OrderedDict()
        self._busy: dict[str, int] = {}  # requests that wait or run

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
                self._tokens.popitem(last=False)
        self._busy[tenant] = self._busy.get(tenant, 0) + 1

    def leave(self, tenant: str) -> None:
        """Note that a request is over."""
        left = self._busy.get(tenant, 0) - 1
        if left > 0:
            self._busy[tenant] = left
        else:
            self._busy.pop(tenant, None)

    def serve(self, tenant: str, computed_tokens: float, cached_tokens: float) -> None:
        """Charge a tenant."""
        if tenant in self._tokens:
            self._tokens[tenant] += computed_tokens + CACHED_SHARE * cached_tokens

    @property
    def busy_tenants(self) -> int:
        """How many tenants have requests."""
        return len(self._busy)


class Waiting:
    """Tickets by number, and the lines that they stand in."""

    def __init__(self) -> None:
        self.size_bytes = 0
        self._tickets: dict[int, Ticket] = {}
        self._at_gates: dict[int, Ticket] = {}
        self._lines: dict[str, dict[int, Ticket]] = {}

    def __len__(self) -> int:
        return len(self._tickets)

    def add(self, ticket: Ticket, *, at_gate: bool) -> None:
        """Let a request wait, or wait elsewhere from now on."""
        self.remove(ticket.hold)
        ticket.at_gate = at_gate
        number = ticket.hold.number
        self._tickets[number] = ticket
        self.size_bytes += ticket.size_bytes
        (self._at_gates if at_gate else self._lines.setdefault(ticket.hold.demand.model, {}))[number] = ticket

    def remove(self, hold: Hold) -> Ticket | None:
        """Let a request wait no longer."""
        ticket = self._tickets.pop(hold.number, None)
        if ticket is None:
            return None
        self.size_bytes -= ticket.size_bytes
        if self._at_gates.pop(hold.number, None) is None:
            line = self._lines[hold.demand.model]
            del line[hold.number]
            if not line:
                del self._lines[hold.demand.model]
        return ticket

    def get(self, hold: Hold) -> Ticket | None:
        """Return a hold's ticket, None where it does not wait here."""
        return self._tickets.get(hold.number)

    def all(self) -> list[Ticket]:
        """Return everybody who waits, in the order of arrival."""
        return [self._tickets[number] for number in sorted(self._tickets)]

    def at_gates(self) -> list[Ticket]:
        """Return those that wait for room where they are cheapest: by priority, then the oldest conversation first."""
        return sorted(
            self._at_gates.values(), key=lambda ticket: (-ticket.turn.demand.priority, ticket.turn.conversation.number)
        )

    def models(self) -> list[str]:
        """Return the models for which a line waits."""
        return list(self._lines)

    def first(self, model: str, served: Served) -> Ticket | None:
        """Return who is next in a model's line."""
        line = self._lines.get(model)
        return min(line.values(), key=lambda ticket: rank(ticket.turn, served)) if line else None

    def line(self, model: str, served: Served) -> list[Ticket]:
        """Return those who wait in a model's line, the next one first."""
        return sorted(self._lines.get(model, {}).values(), key=lambda ticket: rank(ticket.turn, served))

    def line_length(self, model: str) -> int:
        """Return how many wait in a model's line."""
        return len(self._lines.get(model, ()))


def rank(turn: Turn, served: Served) -> tuple[float, float, int]:
    """Return where a request stands in its line; the least goes first."""
    conversation = turn.conversation
    return (-turn.demand.priority, served.level(conversation.tenant), conversation.number)
