"""Whether a replica has room for one more request: so that what runs there can grow to its end without preemption.

    room = fill x capacity - promised        promises include the answers that are expected

Those do not all end at once, so where that leaves no room the most that will be held at any time decides (`lifetimes`).

`fill` starts near one, is lowered whenever the engine reports preemptions, which say that expectations were too small,
and recovers while it reports none. An empty replica is open to anything that can fit at all. A tenant that takes more
than its share finds it closed earlier (`fairness`).
"""

from __future__ import annotations

from math import inf

from kvroute.routing.cost import Work, step_s
from kvroute.routing.demand import Prefix
from kvroute.routing.fairness import ROOM_SHARE, TIME_SHARE, Reserve
from kvroute.routing.member import Member
from kvroute.routing.replica import ReplicaId

FILL = 0.95
FILL_MIN = 0.6
CUT = 0.95  # for a report that shows preemptions
ROUND_S = 5.0  # after a cut, in which what was let in before it still shows some
RECOVERY_S = 0.002  # of `fill`, for each second without
REPLICAS_MAX = 4096


class Calibration:
    """How much of one replica's cache may be promised."""

    __slots__ = ("_cut_s", "_preemptions", "_since_s", "fill", "preempted_s")

    def __init__(self, now_s: float) -> None:
        self.fill = FILL
        self.preempted_s: float | None = None  # when a report last showed preemptions
        self._preemptions: int | None = None
        self._cut_s = -inf
        self._since_s = now_s

    def observe(self, preemptions: int, now_s: float) -> None:
        """Take in the engine's count of preemptions."""
        old, self._preemptions = self._preemptions, preemptions
        if old is not None and preemptions > old:
            if now_s >= self._cut_s + ROUND_S:
                self.fill, self._cut_s = max(self.fill * CUT, FILL_MIN), now_s
            self.preempted_s = now_s
        elif old is None or preemptions < old:  # first seen, or an engine that has restarted
            self.preempted_s = None
        else:
            self.fill = min(self.fill + RECOVERY_S * (now_s - self._since_s), FILL)
        self._since_s = now_s


class Gate:
    """The calibrations of all replicas. Bounded; a replica that was forgotten starts over."""

    def __init__(self) -> None:
        self._known: dict[ReplicaId, Calibration] = {}

    def of(self, member: Member, now_s: float) -> Calibration:
        """Return a replica's calibration, brought up to its last report."""
        id = member.replica.id
        known = self._known.get(id)
        if known is None:
            while len(self._known) >= REPLICAS_MAX:
                del self._known[next(iter(self._known))]
            known = self._known[id] = Calibration(now_s)
        known.observe(member.load.preemptions, now_s)
        return known

    def is_open(
        self, member: Member, work: Work, prefix: Prefix | None, now_s: float, reserve: Reserve | None = None
    ) -> bool:
        """Return whether a request may go there now, and leaves others what it has to."""
        view, others_tokens = member.view, 0.0
        if not view.sequences:
            return True
        sequences = view.sequences + work.sequences
        if reserve is not None:
            rates = member.rates
            ahead_s = view.pending_prefill_tokens * rates.token_s
            if ahead_s > max(step_s(view, rates), TIME_SHARE * reserve.first_token_s):
                return False
            sequences += 1
            others_tokens = min(reserve.room_tokens, ROOM_SHARE * (view.capacity_tokens or 0))
        if view.max_num_seqs and sequences > view.max_num_seqs:
            return False
        if not view.capacity_tokens:
            return True
        limit = self.of(member, now_s).fill * view.capacity_tokens - others_tokens
        if view.kv_tokens + member.asks(work, prefix)[0] <= limit:
            return True
        if prefix is not None and member.share(prefix):
            return self.is_open(member, work, prefix, now_s, reserve)
        return member.peak_with(work, prefix, now_s) <= limit
