"""Policies that are asked beside the one that is followed: where would they have placed, and at which price?

    each placement -> every shadow chooses among the same members, with the same hits and loads -> two sums are kept

A shadow's own state (whose turn it is, what it has placed) goes on as if it had been followed; the replicas' state is
what the followed policy made of it. So a comparison says who would choose better next, and not where the other would
have led: for that there is the simulator. Prices are kvroute's, in seconds, for both.

Bounded: at most SHADOWS_MAX policies, and of a large pool only every n-th placement, so that on average no more than
LOOKS members are looked at for each placement. A policy that fails changes nothing for the request; it is counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from kvroute.routing.lease import Placement
from kvroute.routing.member import Member
from kvroute.routing.policy import Case, Policy
from kvroute.routing.replica import ReplicaId

SHADOWS_MAX = 4
LOOKS = 64
REPLICAS_MAX = 4096


class Tally(Struct):
    """What one shadow came to. Sums only, so that several routers' tallies can be added."""

    policy: str
    placements: int = 0  # that it was asked about and answered
    same: int = 0  # of these, where it chose what was chosen
    prompt_tokens: int = 0
    cost_s: float = 0.0  # predicted for its choices
    our_cost_s: float = 0.0  # predicted for those that were followed
    hit_tokens: int = 0
    our_hit_tokens: int = 0
    failures: int = 0
    placed: dict[ReplicaId, int] = {}  # placements by the replica that it chose; of the first REPLICAS_MAX


class Shadows:
    """Some policies and their tallies."""

    def __init__(self, policies: Mapping[str, Policy]) -> None:
        if len(policies) > SHADOWS_MAX:
            raise ValueError(f"at most {SHADOWS_MAX} shadows")
        self._policies = [(policy, Tally(name)) for name, policy in policies.items()]
        self._credit = float(LOOKS)

    @property
    def tallies(self) -> tuple[Tally, ...]:
        """What each came to."""
        return tuple(tally for _, tally in self._policies)

    def observe(
        self, members: Sequence[Member], case: Case, chosen: Placement, placement: Callable[[Member], Placement]
    ) -> None:
        """Ask every shadow about a request, before it is booked.

        Args:
            members: who may have it.
            case: the request.
            chosen: where it goes.
            placement: prices any of the members.
        """
        looks = len(members) * len(self._policies)
        self._credit = min(self._credit + LOOKS, float(max(looks, LOOKS)))
        if self._credit < looks:
            return
        self._credit -= looks
        for policy, tally in self._policies:
            try:
                there = placement(policy(members, case))
            except Exception:  # whatever it is, it is the shadow's and not the request's
                tally.failures += 1
                continue
            tally.placements += 1
            tally.same += there.replica == chosen.replica
            tally.prompt_tokens += there.hit_tokens + there.miss_tokens
            tally.cost_s += there.cost_s
            tally.our_cost_s += chosen.cost_s
            tally.hit_tokens += there.hit_tokens
            tally.our_hit_tokens += chosen.hit_tokens
            if there.replica in tally.placed or len(tally.placed) < REPLICAS_MAX:
                tally.placed[there.replica] = tally.placed.get(there.replica, 0) + 1
