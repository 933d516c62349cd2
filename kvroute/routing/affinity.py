"""The strongest simple rule to compare with: conversations stay where they began, and each replica lets so many live.

A conversation that lives somewhere goes there, whatever waits there. A new one goes where the fewest live, and waits in
line while each replica has its number of them. It lives until it was silent for MEMORY_S. The number is fixed, and the
best one depends on the traffic: who compares with this rule has to try several.

Sources: session affinity of vllm-router and llm-d, with the cap that SGLang's program scheduling and prime-rl put on
live programs; conversations are recognised from their chains, as kvroute does.
"""

from __future__ import annotations

from math import inf

from kvroute.errors import ConfigError
from kvroute.routing.admission import Admission, AdmissionSettings, Chances, Waits
from kvroute.routing.member import Member
from kvroute.routing.turn import Turn

AFFINITY = "affinity"
MEMORY_S = 5.0


class Affinity(Admission):
    """Holds by number alone."""

    def __init__(self, settings: AdmissionSettings, live_max: float) -> None:
        super().__init__(settings)
        self._live_max = live_max

    def choose(self, turn: Turn, chances: Chances, *, is_next: bool) -> Member | Waits:
        """Return the conversation's home, else the replica where the fewest live."""
        members = chances.members
        seat = self._set.seat_of(turn.conversation)
        home = next((member for member in members if seat is not None and member.replica.id == seat.replica), None)
        if home is not None:
            return home
        if not is_next:
            return Waits(False, "others wait")
        best = min(members, key=lambda member: (self._live(member), member.view.sequences, member.last_chosen))
        return best if self._live(best) < self._live_max else Waits(False, "as many live everywhere as may")

    def _live(self, member: Member) -> int:
        return len(self._set.table(member.replica.id).seats)

    def memory_s(self, model: str) -> float:
        """Return how long a silent conversation is taken to live."""
        return MEMORY_S


def affinity_of(policy: str, settings: AdmissionSettings | None) -> Affinity | None:
    """Read `affinity` or `affinity:N`, N conversations a replica; None where it is another policy.

    Raises:
        ConfigError: N is no number from 1 on.
    """
    name, colon, number = policy.partition(":")
    if name != AFFINITY:
        return None
    if colon and not (number.isascii() and number.isdigit() and int(number)):
        raise ConfigError(f"{policy!r}: after {AFFINITY}: comes the number of conversations that may live on a replica")
    unbounded = AdmissionSettings(holds_max=1 << 31, hold_bytes_max=1 << 60, hold_s=1e9)
    return Affinity(settings or unbounded, int(number) if number else inf)
