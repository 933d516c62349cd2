"""The doctor's eyes on simulated replicas, bare and behind servers that change what they say."""

from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest

from kvroute.adapters.doctor import Doctor
from kvroute.adapters.doctor_tokens import Readers
from kvroute.fake.server import build_replica, serve_replica
from kvroute.routing.diagnosis import judge_replica
from tests.adapters.between import between, unchanged


@asynccontextmanager
async def replicas(count=1, **options):
    """Serve simulated replicas; yields their URLs."""
    served = [await serve_replica(build_replica(model="m", speed=100.0, **options)) for _ in range(count)]
    try:
        yield [url for _, url in served]
    finally:
        for runner, _ in served:
            await runner.cleanup()


async def examine(url, *, key=None, model=None):
    """Return the facts of one URL."""
    readers = Readers("auto")
    async with aiohttp.ClientSession() as session:
        try:
            return await Doctor(session, readers, model).examine(url, key)
        finally:
            await readers.close()


def levels(facts):
    """Return the findings that are not well, check -> level; events have tests of their own."""
    return {one.check: one.level for one in judge_replica(facts) if one.level != "ok" and one.check != "kv events"}


async def test_a_replica_that_is_well():
    """Everything is seen: version, models, cache, tokens, clock, and a prompt that is reused as predicted."""
    async with replicas(kv_tokens=8192, block_size=32) as [url]:
        facts = await examine(url)
    assert (facts.version, facts.model, facts.engines[0].capacity_tokens) == ("0.32.0", "m", 8192)
    assert [one.theirs > 0 for one in facts.tokens] == [True] * 4
    [probe] = facts.probes
    assert probe.cached_tokens == (0, probe.predicted_tokens)
    assert probe.counted_hits == probe.predicted_tokens >= 4 * 32
    assert probe.expected_tokens == probe.prompt_tokens
    assert abs(facts.clock_ahead_s) < 2
    assert levels(facts) == {"tokens": "note"}


async def test_each_run_sends_prompts_of_its_own():
    """A second examination is not fooled by what the first one left in the cache."""
    async with replicas() as [url]:
        for _ in range(2):
            [probe] = (await examine(url)).probes
            assert probe.cached_tokens[0] == 0


async def test_nobody_there():
    """What does not answer is asked nothing else."""
    facts = await examine("http://127.0.0.1:9")
    assert facts.ailment == "/health: Connection refused"
    assert levels(facts) == {"health": "fail"}


async def test_a_balancer_behind_the_url():
    """Two replicas that take turns behind one URL reuse nothing: no route there is better than another."""
    async with replicas(2) as urls, between(urls) as url:
        assert levels(await examine(url))["hash probe"] == "fail"


def says(path, status, old, new):
    """Return an edit of what a path answers."""

    def edit(asked, was, body):
        return (status, body.replace(old, new)) if asked == path else unchanged(asked, was, body)

    return edit


def without_details(path, status, body):
    """Take from usage what --enable-prompt-tokens-details adds."""
    if path != "/v1/chat/completions":
        return status, body
    answer = msgspec.json.decode(body)
    answer["usage"]["prompt_tokens_details"] = None
    return status, msgspec.json.encode(answer)


@pytest.mark.parametrize(
    ("edit", "expected"),
    [
        (says("/health", 503, b"", b""), {"health": "fail"}),
        (says("/v1/models", 401, b"", b""), {"api key": "fail"}),
        (says("/v1/models", 404, b"", b""), {"models": "fail"}),
        (says("/metrics", 404, b"", b""), {"metrics": "warn", "tokens": "note"}),
        (says("/metrics", 200, b'caching="True"', b'caching="False"'), {"prefix caching": "fail", "tokens": "note"}),
        (says("/version", 200, b"0.32.0", b"0.99.0"), {"version": "warn", "tokens": "note"}),
        (says("/version", 404, b"", b""), {"version": "note", "tokens": "note"}),
        (says("/tokenize", 404, b"", b""), {"tokens": "warn"}),
        (says("/v1/chat/completions", 500, b"", b""), {"hash probe": "fail", "tokens": "note"}),
        (says("/v1/chat/completions", 200, b"usage", b"used"), {"hash probe": "fail", "tokens": "note"}),
        (without_details, {"usage details": "warn", "tokens": "note"}),
    ],
)
async def test_what_a_replica_says_otherwise(edit, expected):
    """Each answer that is missing or different is one finding, and the rest is examined nevertheless."""
    async with replicas() as urls, between(urls, edit) as url:
        assert levels(await examine(url)) == expected


async def test_a_model_that_is_not_served():
    """--model NAME that a replica does not have is said before anything is sent."""
    async with replicas() as [url]:
        facts = await examine(url, model="n")
    assert (levels(facts), facts.probes) == ({"models": "fail"}, ())
