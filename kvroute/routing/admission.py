"""Who may go now, and who waits: so that memory is enough for what runs, and caches outlive the pauses between turns.

Once prompts are placed well, what is left to lose is thrashing: more live conversations than the pool holds, every turn
recomputing what was just evicted. Two rules prevent it, and a third lets go of them where they are wrong.

Rule 1, the gate. A request goes where what it will hold at its end fits beside what was promised (`gate`). If the
        replica that is cheapest, waiting included, has no room, the request is held, and bound to a replica when there
        is room.
Rule 2, the working set. A conversation that has no seat gets one only on a replica where the conversations that live
        there, grown as they probably will, leave it room (`working_set`, `habits`). Between turns a seat lasts as long
        as keeping the cache serves more than giving the room to others (`memory_plan`). Who has no seat waits in line,
        but for those whose prompt lies in a cache nevertheless;
        conversations with a seat go on. Where more live than fit after all, the youngest loses its seat.
        A forecast alone holds nobody: where little is promised and nothing was lost lately, there is a seat for all.
Rule 3, the measure. The part of the pool that seats may reserve is learnt: it shrinks while conversations that come
        back in time find their caches gone, and grows while requests are held and no cache is lost.

All of it is silent while everything fits. Not known here: the clock, sockets, and what the client is told meanwhile.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby, repeat
from math import ceil

from msgspec import Struct

from kvroute.errors import Overloaded
from kvroute.routing.conversations import Conversation, Conversations
from kvroute.routing.cost import Work, compute_tokens, decode_s, prefill_s
from kvroute.routing.demand import Demand, Prefix, Usage
from kvroute.routing.fairness import Fairness, Reserve
from kvroute.routing.gate import Gate
from kvroute.routing.habits import Forecast, HabitBook, Habits
from kvroute.routing.hold import Hold
from kvroute.routing.lease import Lease
from kvroute.routing.member import Member
from kvroute.routing.memory_plan import Turns, best_plan, population
from kvroute.routing.news import KEPT_MAX, News
from kvroute.routing.pressure import Pressure
from kvroute.routing.replica import ReplicaId
from kvroute.routing.standing import Foresight, Room, Standing, held_of, learnt_of, live_of
from kvroute.routing.turn import Turn
from kvroute.routing.waiting import CACHED_SHARE, Served, Ticket, Waiting, rank
from kvroute.routing.working_set import WorkingSet

PLAN_EVERY_S = 2.0
TURNS_MIN = 16  # further turns seen, from which they are planned with
GAP_GAIN = 0.1
HELD_SHARE = 0.8  # of a prompt, from which a replica that holds it needs no room for it
CALM_SHARE = 0.3  # of a cache, up to which promises leave so much room that only losses are a reason to hold
LOST_NONE = 0.01  # of what came back: so little that nothing is lost to speak of
ASKED_MAX = 16  # of those at one gate, the oldest are asked; the others after them
LOOK_S = 1.0  # after which a request at a gate is asked about again although that gate has not opened
ELSEWHERE_S = 600.0  # after which a turn that another router began is over even if that was not heard
IDLE_SHARE = 0.7  # of a cache, up to which live conversations leave room for more than was foreseen
BYTES_PER_TOKEN = 4  # of a request whose size was not said


class AdmissionSettings(Struct, frozen=True, kw_only=True):
    """Bounds of holding."""

    holds_max: int = 10_000
    hold_bytes_max: int = 256 << 20
    hold_s: float = 300.0


class Waits(Struct, frozen=True):
    """Why a request cannot go now."""

    at_gate: bool  # there is a place for its conversation, and no room to run yet; else it waits in line for a place
    reason: str
    gate: tuple[Member, Work, Prefix | None] | None = (
        None  # where it is cheapest, and what it asks there; None = not at one
    )


class Chances(Struct, frozen=True):
    """What a request would be on each replica that could serve it."""

    members: Sequence[Member]
    work: Callable[[Member], Work]  # what it asks of one
    costs_s: Sequence[float]
    tie_s: float = 0.0  # costs that differ by no more are equal

    def order(self) -> Iterator[int]:
        """Yield the places of members: those of lowest cost by what is in flight, then the others by cost.

        Nearly always the first one is taken, so the others are sorted only when somebody asks for them.
        """
        members, costs_s = self.members, self.costs_s
        limit_s = min(costs_s) + self.tie_s

        def rank_of(at: int) -> tuple[float, int, int]:
            member = members[at]
            return (0.0 if costs_s[at] <= limit_s else costs_s[at], member.view.sequences, member.last_chosen)

        tied = [at for at, cost_s in enumerate(costs_s) if cost_s <= limit_s]
        first = tied[0] if len(tied) == 1 else min(tied, key=rank_of)
        yield first
        yield from sorted((at for at in range(len(members)) if at != first), key=rank_of)


class Admission:
    """The state of holding for one router. Bounded by the settings and by what its parts keep."""

    def __init__(self, settings: AdmissionSettings, name: int = 0) -> None:
        self.settings = settings
        self.news: deque[News] = deque(maxlen=KEPT_MAX)  # to tell the other routers
        self.is_alone = False  # there is no other router: nothing is to be told
        self.pressure = Pressure()
        self.waiting = Waiting()
        self._gate = Gate()
        self._conversations = Conversations(name=name)
        self._habits = HabitBook()
        self._set = WorkingSet()
        self._served = Served()
        self._fairness = Fairness()
        self._silent: OrderedDict[int, tuple[Conversation, float]] = OrderedDict()  # and when they are taken to be over
        self._elsewhere: OrderedDict[int, tuple[Conversation, float]] = (
            OrderedDict()
        )  # and when their turns must be over
        self._count = 0
        self._now_s = 0.0
        self._left_s: float | None = None  # when the last request left the line
        self._gap_s = 1.0  # mean time between two that leave it

    def advance(self, now_s: float) -> None:
        """Let time pass."""
        self._now_s = max(now_s, self._now_s)
        self._set.advance(self._now_s)
        self._fairness.advance(self._now_s)
        while self._silent:
            number, (conversation, due_s) = next(iter(self._silent.items()))
            if due_s > self._now_s:
                break
            del self._silent[number]
            habits = self._habits.of(conversation.model)
            habits.learn_end(conversation.turns)
            habits.silent -= 1
        while self._elsewhere:
            number, (conversation, due_s) = next(iter(self._elsewhere.items()))
            if due_s > self._now_s:
                break
            self._ended(conversation)

    def begin(self, demand: Demand, hits: Mapping[ReplicaId, int], output_tokens: float) -> Turn:
        """Recognise the conversation that a request belongs to."""
        reachable = max(hits.values(), default=0)
        conversation = self._conversations.recognise(demand, reachable, self._now_s)
        self._resume(conversation)
        if conversation.turns > 1 and not conversation.is_repeated:
            self._learn(conversation)
        conversation.last_end_s = None
        self._served.enter(conversation.tenant)
        self._fairness.ask(conversation.tenant)
        turn = Turn(demand, conversation, output_tokens * demand.sequences, self._over)
        turn.found_tokens = reachable
        return turn

    def _resume(self, conversation: Conversation) -> None:
        """Note that a turn is under way, here unless said otherwise."""
        habits, number = self._habits.of(conversation.model), conversation.number
        habits.silent -= self._silent.pop(number, None) is not None
        habits.under_way += not conversation.is_under_way
        self._elsewhere.pop(number, None)
        conversation.is_under_way, conversation.is_elsewhere = True, False

    def _ended(self, conversation: Conversation) -> None:
        """Note that a turn is over."""
        habits, number = self._habits.of(conversation.model), conversation.number
        habits.under_way -= conversation.is_under_way
        self._elsewhere.pop(number, None)
        conversation.is_under_way = conversation.is_elsewhere = False
        self._set.pause(
            conversation, habits.forecast(conversation, 0.0), self._now_s + self.memory_s(conversation.model)
        )
        habits.silent += number not in self._silent
        self._silent[number] = (conversation, self._now_s + habits.over_s())

    def hear(self, news: News, capacity_tokens: int) -> None:
        """Take in what another router tells: there a conversation has gone on, or a turn of it has ended."""
        conversation = self._conversations.hear(news, self._now_s)
        if conversation is None:
            return
        habits = self._habits.of(conversation.model)
        if not news.replica:
            if news.output_tokens >= 0:
                habits.learn_answer(news.output_tokens)
                conversation.answered(int(news.output_tokens))
                conversation.last_end_s = self._now_s
            self._ended(conversation)
            return
        if conversation.turns > 1:
            self._learn(conversation)
        self._resume(conversation)
        conversation.last_end_s, conversation.is_elsewhere = None, True
        self._elsewhere[conversation.number] = (conversation, self._now_s + ELSEWHERE_S)
        forecast = habits.forecast(conversation, news.output_tokens)
        self._set.seat(conversation, ReplicaId(news.replica), forecast, capacity_tokens)

    def _learn(self, conversation: Conversation) -> None:
        habits = self._habits.of(conversation.model)
        habits.learn_turn(conversation)
        if conversation.last_end_s is not None:
            habits.learn_pause(self._now_s - conversation.last_end_s)

    def _is_idle(self, conversation: Conversation) -> bool:
        """Return whether requests wait in line while what lives where this one does fills little of the cache."""
        if not self.waiting.line_length(conversation.model):
            return False
        table = self._set.table_of(conversation)
        return table.capacity_tokens > 0 and table.now_tokens < IDLE_SHARE * table.capacity_tokens

    def choose(self, turn: Turn, chances: Chances, *, is_next: bool) -> Member | Waits:
        """Return the cheapest replica that may have the request now, or why there is none. Changes nothing.

        Args:
            turn: of whom.
            chances: where.
            is_next: nobody else of its model has to go first.
        """
        conversation, members = turn.conversation, chances.members
        seat = self._set.seat_of(conversation)
        home = None if seat is None else seat.replica
        is_suspended = conversation.is_suspended
        if home is not None and any(m.replica.id == home and self._is_crowded(m, conversation) for m in members):
            home, is_suspended = None, True
        for at in chances.order():
            member = members[at]
            has_place = member.replica.id == home or (not is_suspended and is_cached(chances.work(member)))
            if not has_place and not ((is_next or home) and self._has_seat(member, turn)):
                continue
            asked = (member, chances.work(member), conversation.common)
            if self._gate.is_open(*asked, self._now_s, self._reserve(turn)):
                return member
            # To wait is in its price: elsewhere would take longer.
            return Waits(True, "no room where it is cheapest", asked)
        return Waits(False, "the pool is full of live conversations" if is_next else "others wait")

    def _reserve(self, turn: Turn) -> Reserve | None:
        return self._fairness.reserve(turn.conversation.tenant)

    def _forecast(self, turn: Turn) -> Forecast:
        conversation = turn.conversation
        return self._habits.of(conversation.model).forecast(conversation, turn.output_tokens)

    def _has_seat(self, member: Member, turn: Turn) -> bool:
        """Return whether a conversation fits among those that live on a replica. An idle one takes anybody."""
        capacity = member.replica.capacity_tokens
        if not capacity or not member.view.sequences or not self.memory_s(turn.demand.model):
            return True  # where no cache is kept for a next turn, the gate alone decides
        if self._is_calm(member):
            return True
        peak = self._set.peak_tokens(member.replica.id, turn.conversation, self._forecast(turn))
        reserve = self._reserve(turn)
        return peak + (reserve.peak_tokens if reserve else 0.0) <= self.pressure.fill * capacity

    def _is_calm(self, member: Member) -> bool:
        """Return whether a replica shows no reason to hold: little is promised there, and nothing was lost lately."""
        capacity = member.replica.capacity_tokens or 0
        return self.pressure.lost < LOST_NONE and member.view.kv_tokens < CALM_SHARE * capacity

    def _is_crowded(self, member: Member, conversation: Conversation) -> bool:
        """Return whether more lives on a replica than fits, and this is the youngest there."""
        capacity, table = member.replica.capacity_tokens, self._set.table(member.replica.id)
        if not capacity or table.now_tokens <= self.pressure.limit * capacity or self._is_calm(member):
            return False
        return len(table.seats) > 1 and conversation.number == max(table.seats)

    def is_next(self, turn: Turn) -> bool:
        """Return whether a request may go before those that wait in its model's line."""
        first = self.waiting.first(turn.demand.model, self._served)
        return first is None or first.turn is turn or rank(turn, self._served) < rank(first.turn, self._served)

    def seat(self, turn: Turn, member: Member, lease: Lease, hold: Hold | None) -> None:
        """Note that a request was booked."""
        work, conversation = lease.placement.work, turn.conversation
        turn.hit_tokens = work.hit_tokens
        if conversation.turns > 1 and not conversation.is_repeated and self._set.seat_of(conversation):
            size = turn.demand.block_size
            kept = (conversation.tokens - conversation.growth_tokens - 1) // size * size  # what a cache can give back
            found, is_idle = min(turn.found_tokens, kept), self._is_idle(conversation)
            self.pressure.learn_return(kept, found, seats=len(self._set), is_idle=is_idle)
        replica = member.replica
        conversation.is_suspended = False
        forecast = self._forecast(turn)
        self._set.seat(conversation, replica.id, forecast, replica.capacity_tokens or 0)
        self._charge(turn, work.miss_tokens + turn.output_tokens, work.hit_tokens)
        if self._fairness.has_several:
            self._fairness.learn(
                conversation.tenant, lease.own_tokens, peak_tokens=max(forecast),
                first_token_s=prefill_s(member.view, work, member.rates),
                answer_s=decode_s(member.view, work, member.rates),
            )  # fmt: skip
        if not self.is_alone:
            self.news.append(conversation.news(replica.id, turn.output_tokens))
        if hold is None or (ticket := self.waiting.remove(hold)) is None:
            return
        if not ticket.at_gate:
            if self._left_s is not None:
                self._gap_s += GAP_GAIN * (self._now_s - self._left_s - self._gap_s)
            self._left_s = self._now_s

    def _charge(self, turn: Turn, computed_tokens: float, cached_tokens: float) -> None:
        """Have a turn count for what it probably takes, or took, instead of what it counted for until now."""
        tenant, known = turn.conversation.tenant, turn.charged_tokens
        turn.charged_tokens = computed_tokens + CACHED_SHARE * cached_tokens
        self._served.serve(tenant, turn.charged_tokens - known)
        self._fairness.take(tenant, turn.charged_tokens - known)

    def hold(self, turn: Turn, waits: Waits, hold: Hold | None, hits: Mapping[ReplicaId, int], size_bytes: int) -> Hold:
        """Let a request wait, or go on waiting.

        Raises:
            Overloaded: for too long, or too many do.
        """
        ticket = None if hold is None else self.waiting.get(hold)
        if not waits.at_gate and self._set.seat_of(turn.conversation):
            self._set.remove(turn.conversation)
            turn.conversation.is_suspended = True
        if ticket is None:
            if waits.at_gate and self._set.seat_of(turn.conversation):
                self.pressure.learn_wait()
            if waits.gate is not None:
                member, work, prefix = waits.gate
                self._fairness.wait(turn.conversation.tenant, member.asks(work, prefix)[0])
            ticket = self._ticket(turn, waits, size_bytes or BYTES_PER_TOKEN * turn.demand.prompt_tokens)
        elif ticket.hold.until_s <= self._now_s:
            self.waiting.remove(ticket.hold)
            turn.over(None)
            raise self._overloaded(turn, f"waited for {self._now_s - ticket.hold.since_s:.0f} s: {waits.reason}")
        ticket.hits, ticket.is_woken = hits, False
        self.look(ticket, waits)
        return ticket.hold

    def _ticket(self, turn: Turn, waits: Waits, size_bytes: int) -> Ticket:
        settings, waiting = self.settings, self.waiting
        if len(waiting) >= settings.holds_max or waiting.size_bytes + size_bytes > settings.hold_bytes_max:
            turn.over(None)
            raise self._overloaded(turn, f"{len(waiting)} requests wait already: {waits.reason}")
        self._count += 1
        until_s = self._now_s + settings.hold_s
        return Ticket(Hold(self._count, turn.demand, self._now_s, until_s, waits.reason), turn, size_bytes)

    def _overloaded(self, turn: Turn, why: str) -> Overloaded:
        error = Overloaded(f"no memory for this request yet ({why})")
        error.retry_after_s = max(1.0, ceil(self._gap_s * self.waiting.line_length(turn.demand.model)))
        return error

    def drop(self, hold: Hold) -> None:
        """Forget a request that waits."""
        ticket = self.waiting.remove(hold)
        if ticket is not None:
            ticket.turn.over(None)

    def look(self, ticket: Ticket, waits: Waits) -> None:
        """Note that a request was asked about in vain: it need not be before its gate opens or LOOK_S have passed."""
        self.waiting.remove(ticket.hold)
        ticket.gate, ticket.looked_s = waits.gate, self._now_s
        self.waiting.add(ticket, at_gate=waits.at_gate)

    def candidates(self) -> Iterator[Ticket]:
        """Yield who may be next: those at a gate, then each line's first, as long as the last one went.

        Changes between two steps are seen: a ticket that was admitted meanwhile is followed by the next in its line.
        """
        for _, tickets in groupby(self.waiting.at_gates(ASKED_MAX), key=lambda ticket: ticket.turn.demand.priority):
            yield from self._at_gates(tickets)
        for model in self.waiting.models():
            last: Ticket | None = None
            while (first := self.waiting.first(model, self._served)) and first is not last:
                yield first
                last = first

    def _at_gates(self, tickets: Iterable[Ticket]) -> Iterator[Ticket]:
        """Yield those whose gate has opened, then those who might find another one open.

        So room goes to those who waited for it there, whose prefixes lie there, before others bring new ones.
        """
        elsewhere = []
        for ticket in tickets:
            if self.waiting.get(ticket.hold) is not ticket:
                continue
            if ticket.gate is None or self._gate.is_open(*ticket.gate, self._now_s, self._reserve(ticket.turn)):
                yield ticket
            elif self._now_s >= ticket.looked_s + LOOK_S:
                elsewhere.append(ticket)
        yield from elsewhere

    def _over(self, turn: Turn, usage: Usage | None, now_s: float | None) -> None:
        """Take in that a turn is over."""
        if now_s is not None:
            self.advance(now_s)
        conversation = turn.conversation
        conversation.is_repeated = usage is None
        habits = self._habits.of(conversation.model)
        if usage is not None:
            cached = turn.hit_tokens if usage.cached_tokens is None else usage.cached_tokens
            self._charge(turn, max(usage.prompt_tokens - cached, 0) + usage.completion_tokens, cached)
            habits.learn_answer(usage.completion_tokens)
            if turn.demand.sequences == 1:
                conversation.answered(usage.completion_tokens)
            conversation.last_end_s = self._now_s
        self._served.leave(conversation.tenant)
        if not self.is_alone:
            self.news.append(conversation.news("", -1.0 if usage is None else usage.completion_tokens))
        self._ended(conversation)

    def foresee(
        self, demand: Demand, hits: Mapping[ReplicaId, int], output_tokens: float, chances: Chances
    ) -> Foresight:
        """Return what a request would be told; nothing changes."""
        conversation = self._conversations.foresee(demand, max(hits.values(), default=0), self._now_s)
        number = conversation.number if conversation.number in self._conversations else None
        conversation.is_under_way = True
        turn = Turn(demand, conversation, output_tokens * demand.sequences, lambda turn, usage, now: None)
        is_next = self.is_next(turn)
        found = self.choose(turn, chances, is_next=is_next)
        rooms = tuple(map(self._room, repeat(turn), chances.members, map(chances.work, chances.members)))
        line, place = self.waiting.line(demand.model, self._served), rank(turn, self._served)
        seen = (sum(rank(other.turn, self._served) < place for other in line), number, conversation.turns, rooms)
        if isinstance(found, Member):
            return Foresight(found.replica.id, "none", "", *seen)
        if not is_next and not found.at_gate:
            return Foresight(None, "line", found.reason, *seen)
        return Foresight(None, "gate" if any(room.has_seat for room in rooms) else "working set", found.reason, *seen)

    def _room(self, turn: Turn, member: Member, work: Work) -> Room:
        conversation, forecast, id = turn.conversation, self._forecast(turn), member.replica.id
        seat, capacity = self._set.seat_of(conversation), member.replica.capacity_tokens or 0
        return Room(
            replica=id,
            has_seat=(seat is not None and seat.replica == id)
            or (not conversation.is_suspended and is_cached(work))
            or self._has_seat(member, turn),
            is_open=self._gate.is_open(member, work, conversation.common, self._now_s, self._reserve(turn)),
            peak_tokens=round(self._set.peak_tokens(id, conversation, forecast)),
            peak_limit_tokens=round(self.pressure.fill * capacity),
            promised_tokens=member.view.kv_tokens,
            needed_tokens=round(member.asks(work, conversation.common)[0]),
            promised_limit_tokens=round(self._gate.of(member, self._now_s).fill * capacity),
        )

    def standing(self) -> Standing:
        """Return who waits, who lives where, and what was learnt."""
        memory_s = {model: self.memory_s(model) for model, _ in self._habits.items()}
        held = sorted(held_of(self.waiting, self._served, self._now_s), key=lambda held: -held.waited_s)
        live, learnt = live_of(self._set.tables(), self.pressure.fill), learnt_of(self._habits.items(), memory_s)
        return Standing(
            tuple(held), tuple(live), tuple(learnt), self.pressure.fill, self.pressure.lost, self.waiting.size_bytes
        )

    def memory_s(self, model: str) -> float:
        """Return how long a conversation keeps its seat between two turns."""
        return self._habits.of(model).memory_s

    def plan(self, model: str, member: Member, members: Sequence[Member], ttft_weight: float) -> None:
        """Find anew how long that should be, if it is time to, for one of these members."""
        habits, capacity = self._habits.of(model), member.replica.capacity_tokens
        self._fairness.replicas = max(len(members), 1)
        if self._now_s < habits.planned_s + PLAN_EVERY_S or not capacity:
            return
        if habits.turns_seen < TURNS_MIN:
            if habits.ends_seen >= TURNS_MIN:
                habits.memory_s = 0.0  # so far conversations end and do not go on: nothing is kept for a guess
            return
        turns = turns_of(habits, member.rates.attention_tokens)
        room = self.pressure.fill * capacity / max(habits.own_tokens + habits.output_tokens, 1.0)
        room, habits.planned_s = max(room, 1.0), self._now_s
        for one in members:
            one.set_reuse(habits.returns_after(one.turnover_s))
        copes = habits.live() <= len(members) * population(turns, room, member.rates, ttft_weight)
        habits.memory_s = 0.0 if copes else best_plan(turns, room, member.rates).memory_s


def is_cached(work: Work) -> bool:
    """Return whether a replica holds so much of a prompt that it needs no room of others there."""
    return work.hit_tokens >= HELD_SHARE * (work.hit_tokens + work.miss_tokens)


def turns_of(habits: Habits, attention_tokens: float) -> Turns:
    """Return what turns are like, as planning sees them."""
    prompt, growth = int(habits.prompt_tokens), int(habits.growth_tokens)
    shared = int(habits.prompt_tokens - habits.own_tokens)
    return Turns(
        hit_tokens=compute_tokens(max(prompt - growth, 0), growth, attention_tokens),
        miss_tokens=compute_tokens(shared, prompt - shared, attention_tokens),
        output_tokens=max(habits.output_tokens, 1.0),
        kv_tokens=habits.prompt_tokens + habits.output_tokens,
        ends=habits.ends,
        pauses=habits.pauses(),
    )
