"""What routers tell each other of live conversations, so that each knows all seats: a turn that began, or that ended.

News are absolute: each says all that there is to know of the conversation. What is lost is made good by the next; what
comes late, or twice, is told by the number of turns.
"""

from __future__ import annotations

from msgspec import Struct

KEPT_MAX = 1_000  # that wait to be told: beyond, the oldest are not told at all


class News(Struct, frozen=True, array_like=True):
    """A conversation at one moment."""

    id: int  # the same at all routers
    model: str
    tenant: str
    turns: int
    tokens: int
    first_tokens: int
    growth_tokens: int
    shared_tokens: int
    prefix: int
    mark: int
    tip: int
    replica: str  # where its turn runs; "" = it has ended
    output_tokens: float  # that the turn will probably add; of one that has ended, what it added; -1 = it was in vain
