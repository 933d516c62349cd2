"""Replays recorded conversations through an endpoint, turn by turn, and keeps what each call was told."""

from __future__ import annotations

import asyncio
import gzip
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import aiohttp

DATA = Path(__file__).parents[1] / "data"
ANSWER_TOKENS = 40  # long enough to fill a block of 32, short enough for a thousand calls

Messages = list[dict[str, Any]]
Feed = Literal["recorded", "own"]  # which answers the later turns contain


@dataclass(frozen=True)
class Call:
    """One answered request."""

    conversation: int
    turn: int
    replica: str
    prompt_tokens: int
    cached_tokens: int  # what the engine says it reused
    predicted_tokens: int | None  # what the router expected, where it tells
    answer: str


def read_conversations(name: str, count: int | None = None) -> list[Messages]:
    """Read a file of tests/data."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines][:count]


async def replay(url: str, conversations: list[Messages], *, feed: Feed, at_once: int, stream: bool) -> list[Call]:
    """Hold the conversations, `at_once` at a time, each turn after turn."""
    todo = iter(enumerate(conversations))
    calls: list[Call] = []

    async def worker(session: aiohttp.ClientSession) -> None:
        for number, messages in todo:
            await converse(session, number, messages, feed=feed, stream=stream, calls=calls)

    async with (
        aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(at_once):
            group.create_task(worker(session))
    return calls


async def converse(
    session: aiohttp.ClientSession, number: int, messages: Messages, *, feed: Feed, stream: bool, calls: list[Call]
) -> None:
    """Make one call for each assistant message, with everything before it as the prompt."""
    prompt: Messages = []
    for message in messages:
        if message["role"] != "assistant":
            prompt.append(message)
            continue
        call = await ask(session, prompt, number, turn=len(prompt), stream=stream)
        calls.append(call)
        prompt.append(message if feed == "recorded" else {"role": "assistant", "content": call.answer})


async def ask(session: aiohttp.ClientSession, messages: Messages, number: int, *, turn: int, stream: bool) -> Call:
    """Make one call. Greedy, so that a run can be repeated."""
    body: dict[str, Any] = {"model": "tiny", "messages": messages, "max_tokens": ANSWER_TOKENS, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    async with session.post("/v1/chat/completions", json=body) as response:
        text = await response.text()
        assert response.status == 200, text
        answer, usage = read_stream(text) if stream else read_whole(text)
        predicted = response.headers.get("x-kvroute-predicted-tokens")
        return Call(
            conversation=number,
            turn=turn,
            replica=response.headers.get("x-kvroute-replica", ""),
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0,
            predicted_tokens=None if predicted is None else int(predicted),
            answer=answer,
        )


def read_whole(text: str) -> tuple[str, dict[str, Any]]:
    answer = json.loads(text)
    return answer["choices"][0]["message"]["content"] or "", answer["usage"]


def read_stream(text: str) -> tuple[str, dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in text.split("\n") if line.startswith("data: ")]
    assert lines[-1] == "[DONE]", text[-500:]
    events = [json.loads(line) for line in lines[:-1]]
    parts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
    return "".join(parts), events[-1]["usage"]
