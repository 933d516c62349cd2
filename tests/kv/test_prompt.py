"""What a prompt can hit at most."""

from __future__ import annotations

import pytest

from kvroute.kv.chain import Root, chain_of, tokens_of
from kvroute.kv.prompt import Prompt


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (15, 0), (16, 0), (17, 1), (32, 1), (33, 2), (40, 2)])
def test_the_last_token_is_always_computed(tokens, blocks):
    """A prompt of exactly k blocks can hit k - 1 of them; one token more and it can hit k."""
    chain = chain_of(tokens_of(range(tokens)), 16, Root(1))
    assert Prompt(chain, tokens, 16).hit_limit_blocks == blocks


def test_a_chain_that_ends_before_media_limits_what_can_be_hit():
    """Blocks behind the end of the chain are never counted, however long the prompt is."""
    assert Prompt(chain_of(tokens_of(range(32)), 16, Root(1)), 4_000, 16, exact=False).hit_limit_blocks == 2
