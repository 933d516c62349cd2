"""The histograms of a simulated replica: bounds, counting, and what is counted when."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from kvroute.fake.timings import Clocked, Histogram, Timings, token_bounds


@pytest.mark.parametrize(("most", "expected"), [(1, [1]), (100, [1, 2, 5, 10, 20, 50, 100]), (49, [1, 2, 5, 10, 20])])
def test_bounds_of_token_counts(most, expected):
    """1, 2, 5 and their tenfolds, none above the context."""
    assert list(token_bounds(most)) == expected


def test_values_are_counted_up_to_their_bound_inclusive():
    """Cumulated, as Prometheus wants it."""
    histogram = Histogram((1.0, 2.5))
    for value in (0.5, 1.0, 2.0, 9.0):
        histogram.observe(value)
    assert histogram.cumulated() == [("1.0", 2), ("2.5", 3), ("+Inf", 4)]
    assert histogram.sum == 12.5


def test_a_sequence_is_counted_by_phase():
    """Came at 0, admitted at 1, tokens at 3, 4 and 6."""
    timings, sequence = Timings(1000), Clocked(0.0, 40)
    sequence.admitted_s = 1.0
    for now_s in (3.0, 4.0, 6.0):
        timings.token(sequence, now_s)
    timings.finished(sequence)
    sums = {name: histogram.sum for name, _, histogram in timings.named()}
    assert sums == {
        "request_prompt_tokens": 40,
        "request_generation_tokens": 3,
        "time_to_first_token_seconds": 3,
        "inter_token_latency_seconds": 3,
        "request_time_per_output_token_seconds": 1.5,
        "e2e_request_latency_seconds": 6,
        "request_queue_time_seconds": 1,
        "request_inference_time_seconds": 5,
        "request_prefill_time_seconds": 2,
        "request_decode_time_seconds": 3,
    }


async def test_requests_are_timed_where_they_are_served(serve):
    """Each finished sequence once, each token once; what was aborted counts no request."""
    session = await serve(faults=True)
    for _ in range(3):
        await session.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True, "n": 2})
    await session.post("/_fault", json={"kind": "abort_empty"})
    await session.post("/v1/completions", json={"prompt": [7] * 40, "max_tokens": 5})
    async with session.get("/metrics") as response:
        families = {family.name: family for family in text_string_to_metric_families(await response.text())}
    samples = {
        sample.name: sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name.endswith(("_count", "_sum"))
    }
    assert samples["vllm:time_to_first_token_seconds_count"] == samples["vllm:e2e_request_latency_seconds_count"] == 6
    assert samples["vllm:inter_token_latency_seconds_count"] == 24
    assert samples["vllm:request_prompt_tokens_sum"] == 240
    assert samples["vllm:request_generation_tokens_sum"] == 30
    assert 0 < samples["vllm:time_to_first_token_seconds_sum"] <= samples["vllm:e2e_request_latency_seconds_sum"]
