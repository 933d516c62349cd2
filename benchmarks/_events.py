"""Engines that only publish: the KV events of many busy engines, encoded beforehand, sent when told to.

    python _events.py ENGINES STEPS BLOCKS_PER_S PARTS

Each engine fills prompts of 100 blocks in steps of 32, over one shared beginning, and evicts as much, oldest prompt
first and tail first, one event a block, as vLLM does. Lines on stdin: begin to fill the caches, begin each part, end.
Endpoints are printed, one a line, then `ready`; after each part, how many blocks it stored and removed. A rate of 0 is
as fast as it goes.
"""

from __future__ import annotations

import random
import sys
import time
from collections import deque
from typing import Any

import msgspec
import zmq

BLOCK_SIZE, PROMPT_BLOCKS, STEP_BLOCKS, SHARED_BLOCKS, CAPACITY = 16, 100, 32, 20, 2_000
WARM_BLOCKS_PER_S = 40_000
WARM_STEPS = 80  # until the cache is full and every step evicts


class Engine:
    """One engine's events, step by step."""

    def __init__(self, number: int) -> None:
        self._rng = random.Random(number)
        self._pool = [self._rng.randrange(150_000) for _ in range(50_000)]
        self._kept: deque[list[int]] = deque()
        self._used = 0
        self._prompt: list[int] = []
        self._shared = [self._rng.getrandbits(64) for _ in range(SHARED_BLOCKS)]
        self.is_shared_stored = False

    def step(self) -> tuple[bytes, int]:
        """Return the next batch and how many blocks it stores and removes."""
        if not self.is_shared_stored:
            self.is_shared_stored = True
            self._used += SHARED_BLOCKS
            return encode([stored(self._shared, None, self._pool[: SHARED_BLOCKS * BLOCK_SIZE])]), SHARED_BLOCKS
        count = min(STEP_BLOCKS, PROMPT_BLOCKS - SHARED_BLOCKS - len(self._prompt))
        events = []
        while self._used + count > CAPACITY:
            events.append(removed(self._kept[0].pop()))
            self._used -= 1
            if not self._kept[0]:
                self._kept.popleft()
        changed = len(events) + count
        hashes = [self._rng.getrandbits(64) for _ in range(count)]
        start = self._rng.randrange(len(self._pool) - count * BLOCK_SIZE)
        parent = self._prompt[-1] if self._prompt else self._shared[-1]
        events.append(stored(hashes, parent, self._pool[start : start + count * BLOCK_SIZE]))
        self._used += count
        self._prompt += hashes
        if len(self._prompt) == PROMPT_BLOCKS - SHARED_BLOCKS:
            self._kept.append(self._prompt)
            self._prompt = []
        return encode(events), changed


def encode(events: list[dict[str, Any]]) -> bytes:
    return msgspec.msgpack.encode([time.time(), events, 0])


def stored(hashes: list[int], parent: int | None, ids: list[int]) -> dict[str, Any]:
    event = {"type": "BlockStored", "block_hashes": hashes, "parent_block_hash": parent, "token_ids": ids}
    event |= {"block_size": BLOCK_SIZE, "lora_id": None, "medium": "GPU", "lora_name": None}
    return event | {"extra_keys": [None] * len(hashes), "group_idx": 0, "kv_cache_spec_kind": "full_attention"}


def removed(name: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0}


def main(engines: int, steps: int, blocks_per_s: int, parts: int) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sockets = []
    for _ in range(engines):
        socket = context.socket(zmq.PUB)
        socket.set_hwm(0)  # nothing is dropped here: what is measured is how fast the other side takes it
        print(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        sockets.append(socket)
    makers = [Engine(number) for number in range(engines)]
    script = [[maker.step() for maker in makers] for _ in range(WARM_STEPS + parts * steps)]
    print("ready", flush=True)
    sys.stdin.readline()
    play(sockets, script[:WARM_STEPS], 0, WARM_BLOCKS_PER_S)
    for first in range(WARM_STEPS, len(script), steps):
        sys.stdin.readline()
        play(sockets, script[first : first + steps], first, blocks_per_s)
    sys.stdin.readline()  # the sockets stay open until they are no longer wanted


def play(sockets: list[Any], part: list[list[tuple[bytes, int]]], first: int, blocks_per_s: int) -> None:
    """Send a part of the script, its first step under the number `first`."""
    began_s, sent = time.monotonic(), 0
    for number, step in enumerate(part, first):
        for socket, (payload, changed) in zip(sockets, step, strict=True):
            socket.send_multipart([b"", number.to_bytes(8, "big"), payload])
            sent += changed
        if blocks_per_s and (ahead_s := sent / blocks_per_s - (time.monotonic() - began_s)) > 0:
            time.sleep(ahead_s)
    print(sent, flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
