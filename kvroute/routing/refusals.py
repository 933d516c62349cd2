"""What no replica can ever serve is refused here, in the engine's own words.

vLLM refuses a prompt over its context length; one over its whole KV cache it queues for ever, and all behind it.
Lengths that are estimates (`exact` is False) refuse nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from kvroute.errors import BadRequest
from kvroute.routing.demand import Demand
from kvroute.routing.member import Member


def fits(demand: Demand, member: Member) -> bool:
    """Return whether a replica can ever hold the longest prompt."""
    return not demand.exact or demand.longest_prompt <= member.prompt_limits[demand.model]


def fits_context(demand: Demand, member: Member) -> bool:
    """Return whether the longest prompt is within the model's context there."""
    return demand.longest_prompt <= context_tokens(demand, member)


def context_tokens(demand: Demand, member: Member) -> float:
    """Return the longest context of the model there, without end where it is not known."""
    card = member.replica.card(demand.model)
    return inf if card is None or card.max_model_len is None else card.max_model_len


def refuse_if_hopeless(demand: Demand, serving: Sequence[Member]) -> None:
    """Refuse what none of the replicas that serve the model can ever hold, whatever their health is now.

    Raises:
        BadRequest: with the limit of the largest.
    """
    if not serving or any(fits(demand, member) for member in serving):
        return
    within = [member.replica.usable_tokens or 0 for member in serving if fits_context(demand, member)]
    if within:
        raise too_large(demand, max(within))
    raise too_long(demand, int(max(context_tokens(demand, member) for member in serving)))


def too_long(demand: Demand, limit_tokens: int) -> BadRequest:
    """Word the refusal as vLLM 0.32 does."""
    return BadRequest(
        f"This model's maximum context length is {limit_tokens} tokens. However, your prompt contains "
        f"{demand.longest_prompt} input tokens, which exceeds this limit even without any output tokens. "
        "Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={demand.longest_prompt})",
        param="input_tokens",
    )


def too_large(demand: Demand, limit_tokens: int) -> BadRequest:
    """Word the refusal like the one for the context length; vLLM has none, it would wait for ever."""
    return BadRequest(
        f"The KV cache of this model's largest replica holds {limit_tokens} tokens. However, your prompt contains "
        f"{demand.longest_prompt} input tokens, which could never be computed there. "
        "Please reduce the length of the input prompt. "
        f"(parameter=input_tokens, value={demand.longest_prompt})",
        param="input_tokens",
    )


def unknown_model(model: str) -> BadRequest:
    """Word the refusal as vLLM 0.32 does."""
    return BadRequest(f"The model `{model}` does not exist.", param="model", status=404, kind="NotFoundError")
