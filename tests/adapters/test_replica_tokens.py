"""Asking a replica for tokens."""

from __future__ import annotations

import asyncio
import json
from array import array

import pytest

from kvroute.adapters.replica_tokens import (
    ASK_LIMIT_BYTES,
    ASKS_AT_ONCE,
    SILENCES_BEFORE_PAUSE,
    CannotAsk,
    ReplicaTokens,
)
from kvroute.errors import ReplicaBroke, ReplicaUnreachable
from kvroute.kv.prompt import ChatPrompt, TextPrompt

HI = ChatPrompt(messages=[{"role": "user", "content": "hi"}])


class Replica:
    """Answers /tokenize with the length of the body, or as it is told."""

    def __init__(self, answer=None, error=None):
        self.bodies = []
        self.answer, self.error = answer, error
        self.gate = asyncio.Event()
        self.gate.set()

    async def ask(self, path, body):
        assert path == "/tokenize"
        self.bodies.append(json.loads(body))
        await self.gate.wait()
        if self.error:
            raise self.error
        return self.answer or json.dumps({"count": 1, "max_model_len": 9, "tokens": [len(body)]}).encode()


async def test_whole_prompts_are_asked_once():
    """The same prompt again is known; another one is asked for."""
    replica = Replica()
    tokens = ReplicaTokens("m", replica.ask, 10_000)
    first, again = await tokens.ids_of(HI), await tokens.ids_of(HI)
    await tokens.ids_of(TextPrompt("hi", add_special_tokens=False))
    assert (first == again, tokens.hits, tokens.misses, len(replica.bodies)) == (True, 1, 2, 2)
    assert replica.bodies[1] == {"model": "m", "prompt": "hi", "add_special_tokens": False}
    assert len(array("I", first)) == 1


async def test_fields_that_tokenize_does_not_know_travel_as_template_variables():
    """Reasoning effort, thinking and documents reach the template; reasoning has the name that /tokenize reads."""
    replica = Replica()
    chat = ChatPrompt(
        messages=[{"role": "assistant", "content": "a", "reasoning_content": "r"}],
        documents=[{"text": "d"}],
        reasoning_effort="none",
        chat_template_kwargs={"x": 1},
        continue_final_message=True,
        add_generation_prompt=False,
    )
    await ReplicaTokens("m", replica.ask, 10_000).ids_of(chat)
    assert replica.bodies == [
        {
            "model": "m",
            "messages": [{"role": "assistant", "content": "a", "reasoning": "r"}],
            "add_generation_prompt": False,
            "continue_final_message": True,
            "add_special_tokens": False,
            "chat_template_kwargs": {
                "x": 1,
                "enable_thinking": False,
                "reasoning_effort": "none",
                "documents": [{"text": "d"}],
            },
        }
    ]


@pytest.mark.parametrize(
    ("source", "replica"),
    [
        (HI, {"error": ReplicaBroke("404", replica="r")}),
        (HI, {"error": ReplicaUnreachable("refused", replica="r")}),
        (HI, {"error": TimeoutError()}),
        (HI, {"answer": b"<html>"}),
        (HI, {"answer": b'{"tokens": [-1]}'}),
        (TextPrompt("x" * ASK_LIMIT_BYTES), {}),
        (ChatPrompt(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]), {}),
    ],
)
async def test_no_usable_answer_is_said_and_counted(source, replica):
    """Errors, nonsense, prompts that are too long and media, which the replica would have to fetch."""
    tokens = ReplicaTokens("m", Replica(**replica).ask, 10_000)
    with pytest.raises(CannotAsk):
        await tokens.ids_of(source)
    assert tokens.failures == 1


async def test_silence_leads_to_a_pause():
    """After some asks in a row without an answer the next ones fail at once, without bothering the replica."""
    replica = Replica(error=ReplicaUnreachable("refused", replica="r"))
    tokens = ReplicaTokens("m", replica.ask, 10_000)
    for _ in range(SILENCES_BEFORE_PAUSE + 5):
        with pytest.raises(CannotAsk):
            await tokens.ids_of(HI)
    assert len(replica.bodies) == SILENCES_BEFORE_PAUSE


async def test_a_refusal_is_no_silence():
    """Clients with bad requests cannot bring about a pause for the others."""
    replica = Replica(error=ReplicaBroke("400", replica="r"))
    tokens = ReplicaTokens("m", replica.ask, 10_000)
    for _ in range(SILENCES_BEFORE_PAUSE + 5):
        with pytest.raises(CannotAsk):
            await tokens.ids_of(HI)
    assert len(replica.bodies) == SILENCES_BEFORE_PAUSE + 5


async def test_only_so_many_asks_run_at_once():
    """More than the limit do not queue up; they fail at once."""
    replica = Replica()
    replica.gate.clear()
    tokens = ReplicaTokens("m", replica.ask, 10_000)
    asks = [asyncio.ensure_future(tokens.ids_of(TextPrompt(str(number)))) for number in range(ASKS_AT_ONCE + 3)]
    await asyncio.sleep(0)
    replica.gate.set()
    results = await asyncio.gather(*asks, return_exceptions=True)
    assert sum(isinstance(result, CannotAsk) for result in results) == 3
