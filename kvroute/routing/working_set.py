"""Which conversations live on which replica, and what they will hold there.

A conversation has a seat from its first placement until it was silent for longer than its cache is worth. A seat
reserves not what it holds now but what it will probably grow to: its forecast, a sum of tokens for each of a few turns
ahead. Prefixes that several conversations share count once.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

from msgspec import Struct

from kvroute.routing.conversations import Conversation
from kvroute.routing.habits import HORIZONS, Forecast
from kvroute.routing.replica import ReplicaId

EMPTY: Forecast = (0.0,) * len(HORIZONS)


class Seat:
    """A conversation's place."""

    __slots__ = ("conversation", "due_s", "forecast", "prefix", "replica")

    def __init__(self, conversation: Conversation, replica: ReplicaId, forecast: Forecast) -> None:
        self.conversation = conversation
        self.replica = replica
        self.forecast = forecast
        self.prefix = conversation.prefix  # as it was counted: that others share it may turn out later
        self.due_s: float | None = None  # when it ends, unless the conversation goes on; None while a turn is under way


class Table(Struct):
    """One replica's seats, summed."""

    sums: Forecast = EMPTY
    seats: dict[int, Seat] = {}  # by the conversation's number
    prefixes: dict[int, list[int]] = {}  # shared prefix -> its tokens, and how many seats use it
    shared_tokens: int = 0
    capacity_tokens: int = 0  # of the replica; 0 = not known

    @property
    def now_tokens(self) -> float:
        """What the conversations hold now."""
        return self.sums[0] + self.shared_tokens


class WorkingSet:
    """The seats on all replicas. As many as there are conversations known at most."""

    def __init__(self) -> None:
        self._seats: dict[int, Seat] = {}
        self._tables: dict[ReplicaId, Table] = {}
        self._due: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._seats)

    def seat_of(self, conversation: Conversation) -> Seat | None:
        """Return a conversation's seat."""
        return self._seats.get(conversation.number)

    def table(self, replica: ReplicaId) -> Table:
        """Return a replica's seats."""
        return self._tables.get(replica) or Table()

    def tables(self) -> Mapping[ReplicaId, Table]:
        """Return the seats by replica, of those that have any."""
        return self._tables

    def table_of(self, conversation: Conversation) -> Table:
        """Return the seats of the replica where a conversation has its own."""
        seat = self._seats.get(conversation.number)
        return Table() if seat is None else self._tables[seat.replica]

    def peak_tokens(self, replica: ReplicaId, conversation: Conversation, forecast: Forecast) -> float:
        """Return what a replica's conversations will hold at most, with this one among them."""
        table = self.table(replica)
        seat = table.seats.get(conversation.number)
        known = seat.forecast if seat else EMPTY
        prefix = table.prefixes.get(conversation.prefix)
        more = max(conversation.shared_tokens - (prefix[0] if prefix else 0), 0)
        peak = max(a + b - c for a, b, c in zip(table.sums, forecast, known, strict=True))
        return peak + table.shared_tokens + more

    def seat(
        self, conversation: Conversation, replica: ReplicaId, forecast: Forecast, capacity_tokens: int = 0
    ) -> None:
        """Give a conversation a seat, or move it, for a turn that begins."""
        self.remove(conversation)
        seat = self._seats[conversation.number] = Seat(conversation, replica, forecast)
        table = self._tables.setdefault(replica, Table())
        table.seats[conversation.number] = seat
        table.capacity_tokens = capacity_tokens
        table.sums = tuple([a + b for a, b in zip(table.sums, forecast, strict=True)])
        prefix = table.prefixes.setdefault(conversation.prefix, [0, 0])
        table.shared_tokens += max(conversation.shared_tokens - prefix[0], 0)
        prefix[0] = max(prefix[0], conversation.shared_tokens)
        prefix[1] += 1

    def pause(self, conversation: Conversation, forecast: Forecast, until_s: float) -> None:
        """Keep a conversation's seat between two turns, until a time."""
        seat = self._seats.get(conversation.number)
        if seat is None:
            return
        table = self._tables[seat.replica]
        table.sums = tuple([a - b + c for a, b, c in zip(table.sums, seat.forecast, forecast, strict=True)])
        seat.forecast, seat.due_s = forecast, until_s
        heappush(self._due, (until_s, conversation.number))

    def remove(self, conversation: Conversation) -> None:
        """Take a conversation's seat away."""
        seat = self._seats.pop(conversation.number, None)
        if seat is None:
            return
        table = self._tables[seat.replica]
        del table.seats[conversation.number]
        if not table.seats:
            del self._tables[seat.replica]  # sums of floating point numbers start afresh
            return
        table.sums = tuple([a - b for a, b in zip(table.sums, seat.forecast, strict=True)])
        prefix = table.prefixes[seat.prefix]
        prefix[1] -= 1
        if not prefix[1]:
            table.shared_tokens -= prefix[0]
            del table.prefixes[seat.prefix]

    def advance(self, now_s: float) -> None:
        """End the seats of conversations that were silent for too long."""
        while self._due and self._due[0][0] <= now_s:
            due_s, number = heappop(self._due)
            seat = self._seats.get(number)
            if seat and seat.due_s == due_s:
                self.remove(seat.conversation)
