"""KV events as different releases of vLLM encode them, from the field tables of `vllm/distributed/kv_events.py`.

An event is a dictionary of the newest form's fields. A release leaves out the fields that it does not have, writes
positional arrays up to 0.23 and maps from 0.24, and drops trailing defaults.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

STORED = (  # field, first release that has it
    *(("block_hashes", 9), ("parent_block_hash", 9), ("token_ids", 9), ("block_size", 9), ("lora_id", 9)),
    *(("medium", 10), ("lora_name", 14), ("extra_keys", 18), ("group_idx", 20), ("kv_cache_spec_kind", 22)),
    *(("kv_cache_spec_sliding_window", 22), ("locality", 26), ("ownership", 29), ("session_id", 30)),
)
REMOVED = (("block_hashes", 9), ("medium", 10), ("group_idx", 20), ("locality", 26), ("ownership", 29))
FIELDS = {"BlockStored": STORED, "BlockRemoved": REMOVED, "AllBlocksCleared": ()}
ALWAYS = {"parent_block_hash", "lora_id", "medium", "lora_name"}  # written even where they are null
RELEASES = (9, 16, 20, 23, 32)
DATA = Path(__file__).resolve().parents[1] / "data" / "kv"


def stored(hashes: list[Any], parent: Any, ids: list[int], block_size: int, **rest: Any) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids}
    event |= {"block_size": block_size, "medium": "GPU", "extra_keys": [None] * len(hashes), "group_idx": 0}
    return event | {"kv_cache_spec_kind": "full_attention"} | rest


def removed(*hashes: Any, **rest: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", "group_idx": 0} | rest


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def encoded(events: list[dict[str, Any]], release: int = 32, rank: int | None = 0) -> bytes:
    """Encode a batch as release 0.<release> does."""
    batch = [1795978425.85, [_form(event, release) for event in events]]
    return msgspec.msgpack.encode(batch if rank is None else [*batch, rank])


def _form(event: dict[str, Any], release: int) -> Any:
    kind = event["type"]
    names = [name for name, since in FIELDS[kind] if since <= release]
    if release >= 24:
        return {"type": kind} | {n: event.get(n) for n in names if event.get(n) is not None or n in ALWAYS}
    values = [event.get(name) for name in names]
    while values and values[-1] is None and names[len(values) - 1] not in ALWAYS:
        values.pop()
    return [kind, *values]


def recorded(name: str) -> dict[str, Any]:
    """Return a recording of tests/data/kv."""
    return json.loads((DATA / f"{name}.json").read_text())


def payloads(recording: dict[str, Any]) -> list[bytes]:
    return [bytes.fromhex(message["frames_hex"][-1]) for message in recording["messages"]]
