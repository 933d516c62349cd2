"""How much of the pool live conversations may reserve: learnt from what becomes of their caches.

A conversation that comes back while it still has its seat should find its cache. What it does not find was evicted: the
seats together hold more than fits, whatever forecasts say, and `fill` shrinks. While requests are held and nothing is
lost, the forecasts were too careful (prompts share more, or grow less), and `fill` grows. As with congestion on a
network: cut quickly, grow slowly.
"""

from __future__ import annotations

FILL = 0.9  # of the capacity, to begin with
FILL_MIN, FILL_MAX = 0.3, 8.0
GAIN = 0.05  # of a new return: the last 20 or so count
LOST_MAX = 0.10  # share of the tokens that came back, over which the set is too large
LOST_FEW = 0.03  # under which it may grow
CUT, GROWTH = 0.98, 1.005  # for each return
PREEMPTED = 0.97  # for each report that shows preemptions


class Pressure:
    """One number and the reason for it."""

    def __init__(self) -> None:
        self.fill = FILL
        self.lost = 0.0  # share of returning conversations' tokens that were evicted, lately

    def learn_return(self, kept_tokens: int, found_tokens: int, *, is_holding: bool) -> None:
        """Take in that a conversation with a seat has come back, and what of its cache is left."""
        if kept_tokens <= 0:
            return
        self.lost += GAIN * (1.0 - found_tokens / kept_tokens - self.lost)
        if self.lost > LOST_MAX:
            self.fill = max(self.fill * CUT, FILL_MIN)
        elif is_holding and self.lost < LOST_FEW:
            self.fill = min(self.fill * GROWTH, FILL_MAX)
