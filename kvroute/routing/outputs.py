"""How long answers become, learnt per model and tenant.

A client's `max_tokens` is a bound, not an expectation. What a tenant's answers of a model were is the better guess; a
tenant that is new takes the model's, a model that is new the seed.
"""

from __future__ import annotations

from collections import OrderedDict

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

    def expect(self, demand: Demand) -> float:
        """Return the tokens that each answer will probably have."""
        of_model = self._tokens.get((demand.model, None), SEED_TOKENS)
        known = self._tokens.get((demand.model, demand.tenant), of_model)
        return known if demand.output_tokens is None else min(known, float(demand.output_tokens))

    def learn(self, demand: Demand, completion_tokens: int) -> None:
        """Take in what an answer came to, summed over its sequences."""
        tokens = completion_tokens / max(demand.sequences, 1)
        for key in ((demand.model, demand.tenant), (demand.model, None)):
            old = self._tokens.pop(key, None)
            gain = FIRST_GAIN if old is None else GAIN
            known = SEED_TOKENS if old is None else old
            self._tokens[key] = (1 - gain) * known + gain * min(tokens, OUTLIER * max(known, 1.0))
        while len(self._tokens) > KEYS_MAX:
            self._tokens.popitem(last=False)
