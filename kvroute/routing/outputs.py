"""How long answers become, learnt per model and tenant.

A client's `max_tokens` is a bound, not an expectation. What a tenant's answers of a model were is the better guess; a
tenant that is new takes the model's, a model that is new the seed. How much answers differ from it is learnt as well.
"""

from __future__ import annotations

from collections import OrderedDict
from math import sqrt

from kvroute.routing.demand import Demand

SEED_TOKENS = 200.0  # answers of chat traces: 200 to 450 tokens in the mean
GAIN = 0.05
FIRST_GAIN = 0.5  # the first answer already says more than the seed
OUTLIER = 8.0  # an answer counts as at most so many times what was expected: one that never ends moves little
KEYS_MAX = 1024


class OutputEstimates:
    """Means that forget, one for each (model, tenant) and one for each model. Bounded: the longest unused goes."""

    def __init__(self) -> None:
        self._tokens: OrderedDict[tuple[str, str | None], float] = OrderedDict()
        self._squares: dict[str, float] = {}  # mean of squared differences from what was expected, in shares of that

    def expect(self, demand: Demand) -> float:
        """Return the tokens that each answer will probably have."""
        of_model = self._tokens.get((demand.model, None), SEED_TOKENS)
        known = self._tokens.get((demand.model, demand.tenant), of_model)
        return known if demand.output_tokens is None else min(known, float(demand.output_tokens))

    def spread(self, model: str) -> float:
        """Return how much answers of a model differ from what is expected: 0 = not at all, 1 = nothing is known."""
        return min(sqrt(self._squares.get(model, 1.0)), 1.0)

    def learn(self, demand: Demand, completion_tokens: int) -> None:
        """Take in what an answer came to, summed over its sequences."""
        tokens = completion_tokens / max(demand.sequences, 1)
        expected = max(self.expect(demand), 1.0)
        square, known = min(tokens / expected - 1.0, OUTLIER) ** 2, self._squares.pop(demand.model, 1.0)
        self._squares[demand.model] = known + GAIN * (square - known)
        while len(self._squares) > KEYS_MAX:
            del self._squares[next(iter(self._squares))]
        for key in ((demand.model, demand.tenant), (demand.model, None)):
            old = self._tokens.pop(key, None)
            gain = FIRST_GAIN if old is None else GAIN
            known = SEED_TOKENS if old is None else old
            self._tokens[key] = (1 - gain) * known + gain * min(tokens, OUTLIER * max(known, 1.0))
        while len(self._tokens) > KEYS_MAX:
            self._tokens.popitem(last=False)
