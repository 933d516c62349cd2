"""What can never be served is refused at once, in the engine's words."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvroute.errors import BadRequest, NoReplica
from tests.routing.builders import ask, ids, replica, router_of


def refusal(router: object, *args: object, **fields: object) -> BadRequest:
    with pytest.raises(BadRequest) as caught:
        router.place(ask(*args, **fields), {}, now=0.0)
    return caught.value


def test_a_prompt_over_the_context_is_refused_as_vllm_does():
    """Status, type, parameter and wording are those of vLLM 0.32."""
    error = refusal(router_of("r0", replica("r1", context=4_096)), 9_000)
    assert (error.status, error.kind, error.param) == (400, "BadRequestError", "input_tokens")
    assert error.message == (
        "This model's maximum context length is 8192 tokens. However, your prompt contains 9000 input tokens, "
        "which exceeds this limit even without any output tokens. Please reduce the length of the input prompt. "
        "(parameter=input_tokens, value=9000)"
    )


def test_a_prompt_of_the_whole_context_passes():
    """The limit itself is the engine's to judge."""
    assert router_of("r0").place(ask(8_192), {}, now=0.0).replica.id == "r0"


def test_a_prompt_goes_where_the_context_is_long_enough():
    """Of replicas with different contexts only those that can hold the prompt are asked, however busy they are."""
    router = router_of(replica("r0", context=4_096), replica("r1"))
    chosen = {router.place(ask(5_000), {}, now=0.0).replica.id for _ in range(5)}
    assert chosen == {"r1"}


def test_a_prompt_over_the_whole_cache_is_refused():
    """It would block the engine's queue for ever; the message names what the largest replica holds."""
    error = refusal(router_of(replica("r0", context=None, capacity_tokens=1_600)), 1_585)
    assert (error.status, error.kind, error.param) == (400, "BadRequestError", "input_tokens")
    assert "holds 1584 tokens" in error.message
    assert "1585 input tokens" in error.message


def test_only_the_longest_prompt_counts():
    """Several prompts of one request need not fit at once."""
    router = router_of(replica("r0", capacity_tokens=1_600))
    assert router.place(ask(9_000, longest_prompt=900), {}, now=0.0).replica.id == "r0"


def test_estimates_refuse_nothing():
    """A length that is only estimated leaves the judgement to the engine."""
    router = router_of(replica("r0", capacity_tokens=1_600))
    assert router.place(ask(9_000, exact=False), {}, now=0.0).replica.id == "r0"


def test_a_model_that_nobody_serves_is_not_found():
    """Status, type, parameter and wording are those of vLLM 0.32."""
    error = refusal(router_of("r0"), 10, "nope")
    assert (error.status, error.kind, error.param) == (404, "NotFoundError", "model")
    assert error.message == "The model `nope` does not exist."


def test_an_unknown_model_is_not_denied_before_all_replicas_have_spoken():
    """While a replica has not said what it serves, a model may yet turn up: the request can wait."""
    with pytest.raises(NoReplica):
        router_of("r0", replace(replica("r1"), cards=())).place(ask(10, "nope"), {}, now=0.0)


def test_what_only_an_ill_replica_could_hold_is_not_refused_for_good():
    """A prompt that fits a replica which is down now is a matter of waiting, not of the client's."""
    router = router_of(replica("r0", context=4_096), "r1")
    router.fleet.set_health(next(ids("r1")), False)
    with pytest.raises(NoReplica):
        router.place(ask(5_000), {}, now=0.0)
