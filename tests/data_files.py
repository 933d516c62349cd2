"""The recorded conversations in tests/data."""

from __future__ import annotations

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

DATA = Path(__file__).parent / "data"


@cache
def conversations(name: str) -> list[list[dict[str, Any]]]:
    """Return the conversations of a file: lists of messages. Do not change them."""
    with gzip.open(DATA / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [json.loads(line)["messages"] for line in lines]


def calls_of(messages: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Return the prompt of every call of a conversation: what stands before each answer."""
    return [messages[:at] for at, message in enumerate(messages) if message["role"] == "assistant"]
