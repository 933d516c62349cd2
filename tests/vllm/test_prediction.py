"""What the router expected beside what the engine reused, where nothing is evicted and nothing runs side by side."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from rich.table import Table

from tests.vllm.conversations import Call, Feed, read_conversations, replay
from tests.vllm.engines import BLOCK_SIZE

CONVERSATIONS = 20
EQUAL_SHARE_MIN = 0.95


@pytest.mark.parametrize("feed", ["recorded", "own"])
def test_sequential_predictions_come_true(engines, start_router, report, feed: Feed):
    """For at least 95 % of sequential requests the predicted tokens equal the cached ones."""
    engines.reset_caches()
    router = start_router(proxy__expose_prediction="true")
    conversations = read_conversations("tau_airline_text_a", CONVERSATIONS)
    calls = asyncio.run(replay(router.url, conversations, feed=feed, at_once=1, stream=False))
    kinds = Counter(kind_of(call) for call in calls)
    table = Table("what the engine reused", "calls", "share")
    for kind, count in kinds.most_common():
        table.add_row(kind, str(count), f"{count / len(calls):.4f}")
    report(f"{len(calls)} sequential calls, {feed} answers fed back", table)
    assert kinds["as predicted"] >= EQUAL_SHARE_MIN * len(calls)


def kind_of(call: Call) -> str:
    """Say how a prediction failed, in whole blocks."""
    assert call.predicted_tokens is not None, "the router did not tell its prediction"
    blocks = (call.cached_tokens - call.predicted_tokens) / BLOCK_SIZE
    if blocks == 0:
        return "as predicted"
    if blocks > 0:
        return "more: of an answer whose text does not give its tokens back, and whose events the next turn overtook"
    return "less: a block that the router believed to be held was not"
