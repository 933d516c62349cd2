"""How much of the pool live conversations may reserve: learnt from what becomes of their caches.

A conversation that comes back while it still has its seat should find its cache. What it does not find was evicted: the
seats together hold more than fits, whatever forecasts say, and `fill` shrinks. While requests wait in line, nothing is
lost and little of the cache is filled, forecasts were too careful, and `fill` grows. As with congestion on a network:
cut quickly, but once a round, since what was lost before a cut still comes back after it; grow slowly.
"""

from __future__ import annotations

FILL = 0.85  # of the capacity, to begin with
FILL_MIN, FILL_MAX = 0.3, 1.0
GAIN = 0.02  # of a new return: the last 50 or so count
LOST_MAX = 0.2  # share of the tokens that came back, over which the set is too large
LOST_FEW = 0.05  # under which it may grow
CUT = 0.9  # for each round of returns, as many as there are seats
GROWTH = 1.001  # for each return
WAITED = 0.995  # for each turn that has a seat and finds no room to run
MARGIN = 0.08  # of the capacity: what lives may grow beyond what is reserved for it before the youngest has to leave


class Pressure:
    """One number and the reason for it."""

    def __init__(self) -> None:
        self.fill = FILL
        self.lost = 0.0  # share of returning conversations' tokens that were evicted, lately
        self._rest = 0  # returns until the next cut

    @property
    def limit(self) -> float:
        """Share of the capacity that live conversations may come to hold."""
        return self.fill + MARGIN

    def learn_wait(self) -> None:
        """Take in that a conversation with a seat found no room to run: more have one than fit."""
        self.fill = max(self.fill * WAITED, FILL_MIN)

    def learn_return(self, kept_tokens: int, found_tokens: int, *, seats: int, is_idle: bool) -> None:
        """Take in that a conversation with a seat has come back, and what of its cache is left.

        Args:
            kept_tokens: what it held when it paused.
            found_tokens: what of that is there.
            seats: how many conversations have one.
            is_idle: requests wait in line beside a cache that live conversations fill little of.
        """
        if kept_tokens <= 0:
            return
        self._rest -= 1
        self.lost += GAIN * (1.0 - found_tokens / kept_tokens - self.lost)
        if self.lost > LOST_MAX:
            if self._rest < 0:
                self.fill = max(self.fill * CUT, FILL_MIN)
                self._rest = seats
        elif self.lost < LOST_FEW and (is_idle or self.fill < FILL):
            self.fill = min(self.fill * GROWTH, FILL_MAX)
