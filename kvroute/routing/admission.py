"""What no replica can ever serve is refused here, in the engine's own words.

vLLM refuses a prompt over its context length; one over its whole KV cache it queues for ever, and all behind it.
Lengths that are estimates (`exact` is False) refuse nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvroute.errors import BadRequest
from kvroute.routing.demand import Demand
from kvroute.routing.member import Member
from kvroute.routing.replica import Replica


def fits(demand: Demand, member: Member) -> bool:
    """Return whether a replica can ever hold the longest prompt."""
    return not demand.exact or (fits_context(demand, member) and fits_cache(demand, member.replica))


def refuse_if_hopeless(demand: Demand, serving: Sequence[Member]) -> None:
    """Refuse what none of the replicas that serve the model can ever hold, whatever their health is now.

    Raises:
        BadRequest: with the limit of the largest.
    """
    if not serving or any(fits(demand, member) for member in serving):
        return
    within = [member for member in serving if fits_context(demand, member)]
    if not within:
        raise too_long(demand, max(context_tokens(demand, member) or 0 for member in serving))
    raise too_large(demand, max(usable_tokens(member.replica) or 0 for member in within))


def context_tokens(demand: Demand, member: Member) -> int | None:
    """Return the longest context of the model there, None where it is not known."""
    card = member.cards.get(demand.model)
    return card.max_model_len if card else None


def usable_tokens(replica: Replica) -> int | None:
    """Return what of the KV cache one prompt can have: vLLM never hands out its first block."""
    if not replica.capacity_tokens:
        return None
    return max(replica.capacity_tokens - (replica.block_size or 0), 0)


def fits_context(demand: Demand, member: Member) -> bool:
    """Return whether the longest prompt is within the model's context there."""
    limit = context_tokens(demand, member)
    return limit is None or demand.longest_prompt <= limit


def fits_cache(demand: Demand, replica: Replica) -> bool:
    """Return whether the longest prompt fits into the empty KV cache."""
    limit = usable_tokens(replica)
    return limit is None or demand.longest_prompt <= limit


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
