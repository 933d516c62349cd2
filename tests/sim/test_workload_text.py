"""Recorded texts as workloads."""

from __future__ import annotations

import gzip
from itertools import islice, repeat

import pytest

from kvroute.errors import ConfigError
from kvroute.sim.workload import prompt_chain
from kvroute.sim.workload_text import Conversation, conversations, read_conversation, turns_of
from tests.data_files import DATA

SAID = [
    {"role": "system", "content": "be brief " * 8},
    {"role": "user", "content": "hello " * 20},
    {"role": "assistant", "content": "hi " * 30},
    {"role": "user", "content": "and?" * 9},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": "{}"}}]},
]


def test_every_assistant_message_is_a_request():
    """Its prompt is all that was said before, and begins with the last prompt and answer."""
    first, second = turns_of(Conversation(SAID), 16)
    assert first.output_tokens == pytest.approx(90 / 4, abs=2)
    assert second.prompt_tokens > first.prompt_tokens + first.output_tokens
    assert second.chain.startswith(first.chain)
    assert len(prompt_chain(second, 16)) < len(second.chain)


def test_conversations_share_equal_beginnings_only():
    """One that differs in its second message shares the blocks of the first."""
    other = [SAID[0], {"role": "user", "content": "HELLO " * 20}, SAID[2]]
    [one], [two] = (list(turns_of(Conversation(said), 4)) for said in (SAID[:3], other))
    shared = next(n for n, (a, b) in enumerate(zip(one.chain, two.chain, strict=False)) if a != b) // 8
    assert shared == (8 + 76 + 8) // 4 // 4  # "system", its text and "user", in whole tokens; four of them a block


def test_recorded_dialogues_are_played():
    """Every call of a recorded dialogue comes, one conversation after the other."""
    with gzip.open(DATA / "tau_airline_text_a.jsonl.gz") as file:
        lines = list(islice(file, 5))
    calls = [sum(m["role"] == "assistant" for m in read_conversation(line).messages) for line in lines]
    played = [len(list(script.turns)) for script in conversations(iter(lines), repeat(0.0), 16)]
    assert played == calls


def test_other_lines_are_refused():
    """The error says what is wrong."""
    with pytest.raises(ConfigError, match="no conversation"):
        read_conversation(b'{"messages": "hello"}')
