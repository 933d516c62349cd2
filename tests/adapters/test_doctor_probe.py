"""The prompt that is sent twice: long enough for any block size, and read as the engine reports it."""

import aiohttp
import pytest

from kvroute.adapters.doctor_probe import BLOCKS, Prober
from kvroute.adapters.doctor_tokens import Readers, Tokens
from kvroute.adapters.replica_client import ReplicaClient
from kvroute.fake.server import build_replica, serve_replica
from kvroute.routing.replica import ModelCard


async def probe(block_size, max_model_len=32_768, told=True):
    """Probe a simulated replica that has blocks of this size."""
    app = build_replica(model="m", block_size=block_size, kv_tokens=131_072, speed=1000.0, max_model_len=max_model_len)
    runner, url = await serve_replica(app)
    readers = Readers("auto")
    try:
        async with aiohttp.ClientSession() as session:
            client = ReplicaClient(session, url, None, 30.0)
            tokens = Tokens(await readers.of(ModelCard("m")), client, "m")
            prober = Prober(client, tokens, "m", max_model_len)
            return await prober.probe(0, None, block_size if told else None)
    finally:
        await readers.close()
        await runner.cleanup()


@pytest.mark.parametrize("block_size", [1, 16, 528, 1600])
async def test_the_prompt_fills_blocks_of_any_size(block_size):
    """Several blocks are reused, as predicted, with the big blocks of hybrid models as well."""
    facts = await probe(block_size)
    assert facts.trouble == ""
    assert facts.cached_tokens == (0, facts.predicted_tokens)
    assert facts.predicted_tokens >= BLOCKS * block_size


async def test_a_context_that_is_too_short_for_its_blocks():
    """The prompt still fits; then nothing can be reused, and nothing is predicted."""
    facts = await probe(528, max_model_len=600)
    assert (facts.trouble, facts.predicted_tokens, facts.cached_tokens) == ("", 0, (0, 0))


async def test_a_block_size_that_nobody_told():
    """vLLM's default is assumed, and the difference shows."""
    facts = await probe(24, told=False)
    assert facts.predicted_tokens != facts.cached_tokens[1] > 0
