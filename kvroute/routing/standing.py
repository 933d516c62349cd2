"""How things stand with holding, in values for people and metrics: who waits, who lives where, what was learnt.

Everything here is read; nothing is decided. `Foresight` is what admission would say to a request that is not there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

from msgspec import Struct

from kvroute.routing.habits import Habits
from kvroute.routing.replica import ReplicaId
from kvroute.routing.waiting import Served, Ticket, Waiting
from kvroute.routing.working_set import Table

Rule = Literal["none", "gate", "working set", "line"]
PAUSE_SHARES = (0.5, 0.9)


class Held(Struct, frozen=True):
    """A request that waits."""

    hold: int  # its number
    model: str
    tenant: str
    priority: int
    conversation: int  # its number: the lower, the older
    turn: int  # of the conversation; 1 = its first
    prompt_tokens: int
    waited_s: float
    left_s: float  # until it is refused
    position: int  # in its model's line, 1 = next; 0 = it waits for room where it is cheapest
    reason: str


class Live(Struct, frozen=True):
    """One replica's working set."""

    replica: ReplicaId
    conversations: int
    under_way: int  # of these, conversations that are not pausing
    now_tokens: int  # what they hold now
    peak_tokens: int  # what they will probably hold when they hold most
    capacity_tokens: int  # 0 = not known
    limit_tokens: int  # what may be reserved at the peak


class Learnt(Struct, frozen=True):
    """What one model's conversations usually do."""

    model: str
    turns_seen: int  # beyond first ones
    ends: float  # share of turns that are the last
    prompt_tokens: float
    own_tokens: float  # of these, what nobody else needs
    growth_tokens: float  # that a turn adds
    output_tokens: float
    pauses_s: tuple[float, ...]  # at PAUSE_SHARES, rounded up to a step
    memory_s: float  # how long a conversation keeps its place between two turns


class Standing(Struct, frozen=True):
    """All of one router's admission at one moment."""

    held: tuple[Held, ...]  # the longest first
    live: tuple[Live, ...]
    learnt: tuple[Learnt, ...]
    fill: float  # part of the pool that live conversations may reserve
    lost: float  # share of returning conversations' tokens that were evicted, lately
    held_bytes: int


class Room(Struct, frozen=True):
    """What each rule says of one replica about one request."""

    replica: ReplicaId
    has_seat: bool  # the working set: the conversation lives there, or fits among those that do
    is_open: bool  # the gate: what the request will hold fits beside what was promised
    peak_tokens: int  # of the conversations there with this one, when they hold most
    peak_limit_tokens: int
    promised_tokens: int
    needed_tokens: int  # that the request adds to what was promised
    promised_limit_tokens: int


class Foresight(Struct, frozen=True):
    """What admission would say to a request."""

    replica: ReplicaId | None  # where it would go; None = it would wait
    rule: Rule  # which one would hold it
    reason: str
    ahead: int  # requests of its model's line that would go before it
    conversation: int | None  # that it continues; None = a new one
    turn: int
    rooms: tuple[Room, ...]


def held_of(waiting: Waiting, served: Served, now_s: float) -> Iterator[Held]:
    """Yield every request that waits."""
    for ticket in waiting.at_gates():
        yield _held(ticket, 0, now_s)
    for model in waiting.models():
        for at, ticket in enumerate(waiting.line(model, served), 1):
            yield _held(ticket, at, now_s)


def _held(ticket: Ticket, position: int, now_s: float) -> Held:
    hold, turn = ticket.hold, ticket.turn
    demand, conversation = turn.demand, turn.conversation
    return Held(
        hold.number, demand.model, demand.tenant, demand.priority, conversation.number, conversation.turns,
        demand.prompt_tokens, now_s - hold.since_s, hold.until_s - now_s, position, hold.reason,
    )  # fmt: skip


def live_of(tables: Mapping[ReplicaId, Table], fill: float) -> Iterator[Live]:
    """Yield the working set of every replica that has one."""
    for replica, table in tables.items():
        conversations = [seat.conversation for seat in table.seats.values()]
        yield Live(
            replica,
            len(conversations),
            sum(conversation.is_under_way for conversation in conversations),
            round(table.now_tokens),
            round(max(table.sums) + table.shared_tokens),
            table.capacity_tokens,
            round(fill * table.capacity_tokens),
        )


def learnt_of(habits: Iterable[tuple[str, Habits]], memory_s: Mapping[str, float]) -> Iterator[Learnt]:
    """Yield what is known of every model's conversations."""
    for model, known in habits:
        yield Learnt(
            model, known.turns_seen, known.ends, known.prompt_tokens, known.own_tokens, known.growth_tokens,
            known.output_tokens, tuple(map(known.pause_quantile_s, PAUSE_SHARES)), memory_s.get(model, 0.0),
        )  # fmt: skip
