"""From a request to what routing is asked."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from kvroute.adapters.index import Match, MemoryIndex, namespace_of
from kvroute.adapters.tokens import open_reader
from kvroute.kv.chain import TokenBytes, chain_of, root_of, tokens_of
from kvroute.kv.prompt import Prompt, TextPrompt, TokenPrompt
from kvroute.proxy.catalogue import ModelEntry, ServedModel
from kvroute.proxy.openai import Inference
from kvroute.proxy.question import Asker, Question, demand_of, hits_of
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.replica import ReplicaId
from kvroute.routing.seen import SeenWindow
from tests.adapters.streams import Engine
from tests.kv.encoded import stored

SIZE = 4
R0, R1 = ReplicaId("r0"), ReplicaId("r1")
Parts = tuple[Asker, MemoryIndex, ServedModel, HandlerStats]


def ids(count: int, start: int = 0) -> TokenBytes:
    return tokens_of(range(start, start + count))


def prompt(count: int, start: int = 0) -> Prompt:
    return Prompt(chain_of(ids(count, start), SIZE, root_of("m")), count, SIZE)


def request(*sources: TokenPrompt | TextPrompt, **fields: object) -> Inference:
    return Inference(kind="completion", model="m", sources=sources, **fields)


@pytest.fixture
async def parts() -> AsyncIterator[Parts]:
    reader = await open_reader("none", None, "m", None)
    await reader.start()
    index, stats, namespace = MemoryIndex(), HandlerStats(), namespace_of("m", SIZE, reader.fingerprint)
    for replica in (R0, R1):
        index.join(replica, namespace, 100)
    served = ServedModel(ModelEntry("m", SIZE, namespace, reader))
    yield Asker(index, SeenWindow(), stats), index, served, stats
    await reader.close()


def test_hits_are_summed_over_prompts():
    """A replica's hits are those of all prompts together, each up to what an engine can reuse."""
    prompts = (prompt(16), prompt(9, 100))
    match = Match(({R0: 4, R1: 1}, {R0: 2}), "index")
    assert hits_of(prompts, match.holdings) == {
        R0: 3 * SIZE + 2 * SIZE,
        R1: SIZE,
    }  # of exactly k blocks at most k - 1 hit


async def test_what_may_be_gone_counts_for_less(parts: Parts):
    """Hits on a replica whose events were lost are discounted by how much of what it holds is suspect."""
    asker, index, served, _ = parts
    engine = Engine()
    index.follow(R0, engine.feed())
    await asyncio.sleep(0)
    size = served.entry.block_size
    engine.say(stored([1, 2], None, list(range(2 * size)), size))
    whole = await asker.ask(request(TokenPrompt(ids(2 * size + 1))), served, "t")
    engine.lose()
    doubted = await asker.ask(request(TokenPrompt(ids(2 * size + 1))), served, "t")
    assert (whole.hits, doubted.hits) == ({R0: 2 * size}, {R0: size})


async def test_slower_tiers_are_told_apart(parts: Parts):
    """What only a slower tier holds is no hit, but stored: the router prices its copy."""
    prompts = (prompt(40),)
    match = Match(({R0: 2},), "index", (({R0: 5, R1: 1}, {R0: 7, R1: 1}),))
    assert hits_of(prompts, match.holdings) == {R0: 2 * SIZE}
    assert hits_of(prompts, [tiers[-1] for tiers in match.slower]) == {R0: 7 * SIZE, R1: SIZE}
    assert [match.held(0, replica) for replica in (R0, R1)] == [7, 1]


def test_demand(parts: Parts):
    """Lengths are summed and the longest is known; what the client bounds and whether it streams is told."""
    inference = request(TokenPrompt(ids(16)), TokenPrompt(ids(9)), n=2, max_tokens=7, stream=True)
    demand = demand_of(inference, parts[2], (prompt(16), prompt(9)), "team")
    assert (demand.prompt_tokens, demand.longest_prompt, demand.sequences, demand.output_tokens) == (25, 16, 4, 7)
    assert (demand.tenant, demand.exact, demand.streamed, demand.model) == ("team", True, True, "m")


def test_demand_of_an_adapter(parts: Parts):
    """A request for an adapter asks for replicas that serve the adapter."""
    served = ServedModel(parts[2].entry, lora="l")
    assert demand_of(request(), served, (), "t").model == "l"


def test_demand_without_a_prompt(parts: Parts):
    """A prompt that is not understood has a guessed length, and nothing is refused because of it."""
    demand = demand_of(request(guessed_tokens=50), parts[2], (), "t")
    assert (demand.prompt_tokens, demand.exact) == (50, False)


async def ask(parts: Parts, inference: Inference) -> Question:
    return await parts[0].ask(inference, parts[2], "team")


async def test_held_and_seen(parts: Parts):
    """What a replica holds is a hit there; what went through before was seen, held or not."""
    first = await ask(parts, request(TokenPrompt(ids(17))))
    assert (first.hits, first.seen_tokens, first.reachable_tokens) == ({}, 0, 0)
    parts[1].record(R0, first.prompts[0].chain)
    second = await ask(parts, request(TokenPrompt(ids(17))))
    assert (second.hits, second.seen_tokens, second.reachable_tokens) == ({R0: 16}, 16, 16)


async def test_cache_that_is_not_read(parts: Parts):
    """A request that makes the engine compute everything anew hits nothing."""
    parts[1].record(R0, (await ask(parts, request(TokenPrompt(ids(17))))).prompts[0].chain)
    question = await ask(parts, request(TokenPrompt(ids(17)), reads_cache=False))
    assert (question.hits, question.seen_tokens) == ({}, 0)


async def test_short_prompts_are_not_looked_up(parts: Parts):
    """Where no prompt fills a block, nobody is asked."""
    await ask(parts, request(TokenPrompt(ids(3))))
    await ask(parts, request())
    assert (parts[3].lookups, parts[3].unread_prompts) == (0, 1)
