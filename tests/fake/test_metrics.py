"""A simulated replica's metrics: vLLM's names, types and labels, and figures that are right."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.fake.watch import until

RECORDED = Path(__file__).parent.parent / "data" / "metrics" / "vllm-0.32-after.txt"


async def families(session):
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain")
        return {family.name: family for family in text_string_to_metric_families(await response.text())}


def labels(family):
    """The labels of a family's samples; bounds of buckets are not among them, since the record leaves buckets out."""
    return {frozenset(sample.labels) - {"le"} for sample in family.samples if not sample.name.endswith("_created")}


async def test_every_family_is_one_of_vllms(serve):
    """Names, types and labels are those that a real engine exposes; of the cache's many labels we give some."""
    real = {family.name: family for family in text_string_to_metric_families(RECORDED.read_text())}
    for name, family in (await families(await serve())).items():
        assert family.type == real[name].type, name
        if name == "vllm:cache_config_info":
            assert next(iter(labels(family))) <= next(iter(labels(real[name])))
        else:
            assert labels(family) == labels(real[name]), name


async def test_the_figures_follow_what_was_served(serve):
    """Tokens, hits and endings are counted; gauges are back at zero when the replica is idle."""
    session = await serve(kv_tokens=3200)
    body = {"prompt": [7] * 40, "max_tokens": 5, "ignore_eos": True}
    for _ in range(2):
        await session.post("/v1/completions", json=body)
    found = await families(session)
    values = {
        name.removeprefix("vllm:"): family.samples[0].value
        for name, family in found.items()
        if family.type != "histogram"
        and name not in ("vllm:request_success", "vllm:cache_config_info", "process_start_time_seconds")
        and not name.endswith("_by_source")
    }
    assert values == {
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "engine_sleep_state": 1,  # awake, its first state
        "prefix_cache_queries": 80,
        "prefix_cache_hits": 32,
        "external_prefix_cache_queries": 0,
        "external_prefix_cache_hits": 0,
        "num_preemptions": 0,
        "prompt_tokens": 80,
        "prompt_tokens_cached": 32,
        "generation_tokens": 10,
    }
    sources = {sample.labels["source"]: sample.value for sample in found["vllm:prompt_tokens_by_source"].samples}
    assert sources == {"local_compute": 48, "local_cache_hit": 32, "external_kv_transfer": 0}
    endings = {sample.labels["finished_reason"]: sample.value for sample in found["vllm:request_success"].samples}
    assert endings == {"stop": 0, "length": 2, "abort": 0, "error": 0, "repetition": 0}


async def test_gauges_are_those_of_the_end_of_the_last_step(serve):
    """Who comes while a long prompt is computed, and that prompt itself, show when its step has ended, as at vLLM."""
    session = await serve(kv_tokens=64_000, speed=0.4)

    async def gauges():
        found = await families(session)
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return tuple(found[f"vllm:{name}"].samples[0].value for name in names)

    async def state():
        async with session.get("/_state") as answer:
            return await answer.json()

    def ask(token):
        body = {"prompt": [token] * 8000, "max_tokens": 400, "ignore_eos": True}
        return asyncio.ensure_future(session.post("/v1/completions", json=body))

    asked = [ask(1)]
    await until(state, lambda now: now["running"] == 1)
    asked.append(ask(2))
    assert await until(state, lambda now: now["waiting"] == 1)
    assert await gauges() == (0, 0, 0)
    running, waiting, used = await until(gauges, lambda now: now[0] > 0)
    assert (running, waiting) == (1, 0)
    assert used > 0.1
    await session.post("/sleep?mode=abort&level=0")
    await session.post("/wake_up")
    assert await until(gauges, lambda now: now == (0, 0, 0))
    await asyncio.gather(*asked)


async def test_the_cache_is_described(serve):
    """The labels give the block size, the number of blocks, one of them unusable, and their tokens."""
    config = (await families(await serve(kv_tokens=3200)))["vllm:cache_config_info"].samples[0].labels
    assert (config["block_size"], config["num_gpu_blocks"], config["kv_cache_size_tokens"]) == ("16", "200", "3200")


@pytest.mark.parametrize(("level", "states"), [(0, (0, 0, 0)), (1, (0, 1, 0)), (2, (0, 0, 1))])
async def test_the_state_of_sleep_is_told(serve, level, states):
    """Awake, or how much was given up."""
    session = await serve()
    assert [sample.value for sample in (await families(session))["vllm:engine_sleep_state"].samples] == [1, 0, 0]
    await session.post(f"/sleep?level={level}")
    found = (await families(session))["vllm:engine_sleep_state"].samples
    assert [sample.labels["sleep_state"] for sample in found] == ["awake", "weights_offloaded", "discard_all"]
    assert tuple(sample.value for sample in found) == states
