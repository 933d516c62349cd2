"""What an engine's cache holds, worked out anew from all that it still tells, without any of the router's code but
the hash of a chain: plain dictionaries, one pass over the replay.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import redis
import zmq

from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of

END = b"\xff" * 8
REPORT = "kvroute-report"  # the session under which the router has an engine tell again what a request finds


def replayed(port: int, start: int = 0, attempts: int = 10) -> list[tuple[int, Any]]:
    """Ask an engine for all batches that it keeps, from a number on.

    Before 0.33 an engine drops what a slow asker does not take, the end included: what is missing is asked for again.
    """
    found: list[tuple[int, Any]] = []
    for _ in range(attempts):
        part, is_whole = _answer(port, found[-1][0] + 1 if found else start)
        for seq, payload in part:
            if found and seq != found[-1][0] + 1:
                is_whole = False
                break
            found.append((seq, msgspec.msgpack.decode(payload)))
        if is_whole:
            return found
    raise AssertionError("the replay did not end")


def _answer(port: int, start: int, silence_s: float = 3.0) -> tuple[list[tuple[int, bytes]], bool]:
    """Return the batches of one answer, and whether it came to its end."""
    context: Any = zmq.Context()
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.connect(f"tcp://127.0.0.1:{port}")
    socket.send_multipart([b"", start.to_bytes(8, "big")])
    found: list[tuple[int, bytes]] = []
    try:
        while socket.poll(int(1000 * silence_s)):
            *_, seq, payload = socket.recv_multipart()
            if seq == END:
                return found, True
            found.append((int.from_bytes(seq, "big"), payload))
        return found, False
    finally:
        socket.close()
        context.term()


class Observer:
    """One engine's blocks: engine hash -> (parent, tokens, adapter, salt), and how many copies there are of each."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.blocks: dict[Any, tuple[Any, tuple[int, ...], str | None, str | None]] = {}
        self.copies: Counter[Any] = Counter()
        self.groups: set[Any] = set()  # that were stored to with full attention
        self.removals = 0

    def see(self, batches: list[tuple[int, Any]]) -> Observer:
        for _, batch in batches:
            for event in batch[1]:
                self._see(event)
        return self

    def _see(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            self.copies.clear()
        elif event.get("kv_cache_spec_kind") not in (None, "full_attention"):
            return
        elif event["type"] == "BlockRemoved":
            if event.get("group_idx") in self.groups:
                self.removals += len(event["block_hashes"])
                self.copies.subtract(event["block_hashes"])
        else:
            self.groups.add(event.get("group_idx"))
            parent, size = event["parent_block_hash"], event["block_size"]
            is_report = event.get("session_id") == REPORT and parent is None  # of what is there, perhaps told before
            for number, name in enumerate(event["block_hashes"]):
                keys = [key for key in (event["extra_keys"][number] or []) if key != event["lora_name"]]
                tokens = tuple(event["token_ids"][number * size : (number + 1) * size])
                self.blocks[name] = (parent, tokens, event["lora_name"], keys[0] if keys else None)
                self.copies[name] = max(self.copies[name], 1) if is_report else self.copies[name] + 1
                parent = name

    def chains(self) -> set[PrefixChain]:
        """Return the chain of every block that can be hit."""
        return {chain for name in +self.copies if (chain := self._chain(name)) is not None}

    def _chain(self, name: Any) -> PrefixChain | None:
        tokens: list[tuple[int, ...]] = []
        lora = salt = None
        while name is not None:
            if self.copies[name] <= 0:
                return None
            name, ids, lora, salt = self.blocks[name]
            tokens.append(ids)
        ids = [id for block in reversed(tokens) for id in block]
        return chain_of(tokens_of(ids), len(tokens[0]), root_of(self.model, lora, salt))


def cells_of(chains: set[PrefixChain]) -> set[bytes]:
    """Name the bucket and field of every chain's last block, as docs/decisions/002 has it."""
    cells = set()
    for chain in chains:
        last = len(chain) // 8 - 1
        head = 8 * (last - last % 16)
        cells.add(chain[head : head + 2] + chain[8 * last : 8 * last + 6])
    return cells


def cells_in(client: redis.Redis, replica: str) -> set[bytes]:
    """Read from Redis every cell that says that a replica holds a block."""
    cells: set[bytes] = set()
    for registry in client.keys("{kvr:*}r"):
        token = client.hget(registry, replica)
        if token is None:
            continue
        slot, prefix = int(token.partition(b".")[0]), registry[:-1]
        for key in client.keys(prefix.replace(b"[", b"\\[") + b"b*"):
            if len(key) == len(prefix) + 3:
                for field, slots in client.hgetall(key).items():
                    if int.from_bytes(slots[1:], "little") << 8 * slots[0] >> slot & 1:
                        cells.add(key[-2:] + field)
    return cells
