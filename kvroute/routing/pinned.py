"""Which share of the hit tokens running requests hold for themselves alone.

Fifty conversations that share a system prompt of 4,000 tokens need it once, not fifty times; its own history each needs
alone. Only the engine knows the mixture, and its gauge of KV in use tells: what is in use beyond the new tokens of the
running requests are their hits, each counted once. Booking hits by this share keeps a replica from looking full while
it is not.

Gauges lag by seconds, so averages are compared, not moments, and nothing is believed before MIN_REPORTS of them.
"""

from __future__ import annotations

GAIN = 0.05  # of a new report; the last 20 or so count
MIN_REPORTS = 20
FLOOR = 0.1  # a share of nothing would let any number of conversations in


class PinnedShare:
    """A share from FLOOR to 1; 1, the safe side, until enough was seen."""

    __slots__ = ("_hit_tokens", "_kept_tokens", "_reports", "value")

    def __init__(self) -> None:
        self.value = 1.0
        self._hit_tokens = 0.0  # means over the reports
        self._kept_tokens = 0.0
        self._reports = 0

    def learn(self, hit_tokens: float, new_tokens: float, used_tokens: float) -> None:
        """Take one report in.

        Args:
            hit_tokens: hits of the requests that run, summed over them.
            new_tokens: what they have computed and generated beyond those hits.
            used_tokens: what the engine says is in use for them.
        """
        if hit_tokens <= 0 or used_tokens <= 0:
            return
        self._reports += 1
        self._hit_tokens += GAIN * (hit_tokens - self._hit_tokens)
        self._kept_tokens += GAIN * (max(used_tokens - new_tokens, 0.0) - self._kept_tokens)
        if self._reports >= MIN_REPORTS:
            self.value = min(max(self._kept_tokens / self._hit_tokens, FLOOR), 1.0)
