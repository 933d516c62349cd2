"""A booked place on a replica, and the reasons for it.

    PLACED --began--> BEGAN --finish--> SETTLED
       |__________finish, refuse__________^

A lease is settled once, whatever happens: later calls change nothing. Used as `with lease:`, a body that leaves it open
(the client went away, the task was cancelled, our own mistake) settles it as ABANDONED, which blames nobody.

Only an answer that came to its end teaches rates, and only where it was streamed and hardly had to wait.
"""

from __future__ import annotations

from enum import Enum

from msgspec import Struct

from kvroute.routing.cost import TERMS, View, Work, first_token_s, price, work_of
from kvroute.routing.demand import Demand, Outcome, Usage
from kvroute.routing.member import Booking, Member
from kvroute.routing.outputs import OutputEstimates
from kvroute.routing.rates import Rates
from kvroute.routing.replica import Replica, ReplicaId
from kvroute.routing.turn import Turn

QUIET_SHARE = 0.25  # prefill ahead of a request, as a share of its own, up to which its first token shows the rate


class Placement(Struct, frozen=True):
    """The decision, and what it was made from: the reasons are worked out when somebody asks for them."""

    replica: ReplicaId
    hit_tokens: int  # of the prompt, expected to be in the replica's cache
    miss_tokens: int  # of the prompt, expected to be computed
    policy: str
    cost_s: float
    view: View  # the replica as it was
    work: Work
    rates: Rates
    ttft_weight: float

    @property
    def terms(self) -> dict[str, float]:
        """The cost's terms in seconds, by their names. Their sum is the cost."""
        return dict(zip(TERMS, price(self.view, self.work, self.rates, self.ttft_weight), strict=True))

    @property
    def first_token_s(self) -> float:
        """How long the first token will take."""
        return first_token_s(self.view, self.work, self.rates)


class State(Enum):
    """Where a lease is in its life."""

    PLACED = "placed"
    BEGAN = "began"
    SETTLED = "settled"


class Lease:
    """Made by `Fleet.book`, which has put `booking` on `member` already."""

    __slots__ = (
        "_ahead_tokens", "_batch", "_batch_tokens", "_began_s", "_booking", "_demand", "_member", "_outputs",
        "_placed_s", "_state", "_work", "placement", "promised_tokens", "replica", "reserve_limit_tokens",
        "reserve_tokens", "turn",
    )  # fmt: skip

    def __init__(
        self, member: Member, demand: Demand, work: Work, placement: Placement, *, booking: Booking, now: float,
        reserve_tokens: int, reserve_limit_tokens: int, ahead_tokens: int, outputs: OutputEstimates,
    ) -> None:  # fmt: skip
        self.replica: Replica = member.replica
        self.placement = placement
        self.reserve_tokens = reserve_tokens  # KV tokens to confirm in the shared ledger before sending; 0 = none
        self.reserve_limit_tokens = reserve_limit_tokens  # what all may be promised then: capacity, or what was known
        self.promised_tokens = member.kv_tokens  # by this router to the replica, this request included
        self.turn: Turn | None = None  # of which conversation, where admission looks after them
        self._member = member
        self._demand = demand
        self._work = work
        self._booking = booking
        self._outputs = outputs
        self._ahead_tokens = ahead_tokens
        self._placed_s = now
        self._began_s: float | None = None  # None while there is no first byte that tells of the prefill
        self._batch = self._batch_tokens = 0  # sequences and tokens there when it began
        self._state = State.PLACED

    def __repr__(self) -> str:
        return f"<Lease {self.replica.id}: {self._state.value}>"

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        if self._state is not State.SETTLED:
            self._settle()

    @property
    def own_tokens(self) -> int:
        """What it holds at its end, without what others hold as well."""
        return self._booking.kv_tokens

    @property
    def is_settled(self) -> bool:
        """Whether the place was given back."""
        return self._state is State.SETTLED

    def began(self, now: float) -> None:
        """Note the first byte of the answer: the prefill is over."""
        if self._state is State.PLACED:
            if self._demand.streamed:
                self._began_s = now
            self._begin(self._began_s)

    def presume_began(self) -> None:
        """Note that the prefill must be over by now, where no first byte will tell."""
        if self._state is State.PLACED:
            self._begin()

    def finish(self, outcome: Outcome, now: float, usage: Usage | None = None) -> None:
        """Give the place back and learn from how it went.

        Args:
            outcome: DONE clears the replica's count of failures, FAILED raises it, ABANDONED blames nobody.
            now: the router's clock.
            usage: what the engine counted, where it said so.
        """
        if self._state is State.SETTLED:
            return
        self._settle(now, usage if outcome is Outcome.DONE else None)
        if outcome is Outcome.FAILED:
            self._member.failures += 1
        elif outcome is Outcome.DONE:
            self._member.failures = 0
            if usage is not None:
                self._learn(now, usage)

    def refuse(self, now: float) -> None:
        """Give the place back unused: another router was faster. Nobody is blamed, nothing is learnt."""
        if self._state is not State.SETTLED:
            self._settle(now)

    def blame(self) -> None:
        """Count a failure against the replica after all: another one has served what this one could not."""
        self._member.failures += 1

    def _begin(self, now: float | None = None) -> None:
        self._state = State.BEGAN
        self._member.begin(self._booking, now)
        view = self._member.view
        self._batch, self._batch_tokens = view.sequences, view.kv_tokens

    def _settle(self, now: float | None = None, usage: Usage | None = None) -> None:
        has_begun, self._state = self._state is State.BEGAN, State.SETTLED
        self._member.give_back(self._booking, has_begun=has_begun)
        if self.turn is not None:
            self.turn.over(usage, now)

    def _learn(self, now: float, usage: Usage) -> None:
        self._outputs.learn(self._demand, usage.completion_tokens)
        if self._began_s is None:
            return
        member, work = self._member, self._work
        if usage.cached_tokens is not None:
            miss = max(usage.prompt_tokens - usage.cached_tokens, 1)
            shape = member.rates.attention_tokens
            work = work_of(usage.cached_tokens, miss, work.output_tokens, work.sequences, attention_tokens=shape)
        rates = member.model_rates
        if self._ahead_tokens <= QUIET_SHARE * work.miss_tokens:
            waited = work.compute_tokens + self._ahead_tokens
            rates.learn_prefill(member.speed, waited, self._began_s - self._placed_s)
        steps = usage.completion_tokens // max(work.sequences, 1)
        view = member.view  # this request has left it
        sequences = (self._batch + view.sequences + work.sequences) / 2
        kv_tokens = (self._batch_tokens + view.kv_tokens + self._booking.kv_tokens) / 2
        rates.learn_step(member.speed, steps, now - self._began_s, sequences, kv_tokens)
        member.refresh_rates()
