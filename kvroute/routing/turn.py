"""One request as a turn of its conversation: the thread from recognising it to what came of it."""

from __future__ import annotations

from collections.abc import Callable

from kvroute.routing.conversations import Conversation
from kvroute.routing.demand import Demand, Usage


class Turn:
    """Under way from the moment that it is recognised until it is over, once."""

    __slots__ = (
        "_over", "charged_tokens", "conversation", "demand", "found_tokens", "hit_tokens", "is_over",
        "output_tokens",
    )  # fmt: skip

    def __init__(
        self,
        demand: Demand,
        conversation: Conversation,
        output_tokens: float,
        over: Callable[[Turn, Usage | None, float | None], None],
    ) -> None:
        self.demand = demand
        self.conversation = conversation
        self.output_tokens = output_tokens  # expected of all its sequences
        self.hit_tokens = 0  # where it was placed
        self.found_tokens = 0  # in some cache, when it came
        self.charged_tokens = 0.0  # that it counts as served
        self.is_over = False
        self._over = over

    def over(self, usage: Usage | None, now: float | None = None) -> None:
        """Note that it has ended: with what the engine counted, or with nothing to show for it; None = just now."""
        if not self.is_over:
            self.is_over = True
            self._over(self, usage, now)
