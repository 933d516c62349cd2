"""What an engine says about its prefix cache: the payload of one message of vLLM's KV events.

vLLM publishes msgpack (`vllm/distributed/kv_events.py`, `KVEventBatch`): an array of time, events and rank. Events are
positional arrays up to 0.23 and maps from 0.24; block hashes are integers, negative ones too, or bytes. Releases append
fields, and will add kinds: what is not named here is skipped, unknown kinds are counted.

This file does not know what was said before: sequence numbers are the transport's, parents are `engine_hashes`'.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvroute.kv.chain import TokenBytes

EngineHash = int | bytes  # vLLM's own, opaque: it is never compared with a BlockHash
ENGINE_HASH_BYTES_MAX = 64  # those of releases so far have 32 at most

REPORT_SESSION = "kvroute-report"  # of our own requests that have an engine tell again what they find
PAYLOAD_BYTES_MAX = 64 << 20  # an engine step of a million tokens comes to a tenth of this

# Bytes of msgpack: float 64; map and array heads by their first byte.
_FLOAT64, _MAP16, _MAP32, _ARRAY16, _ARRAY32 = 0xCB, 0xDE, 0xDF, 0xDC, 0xDD


class MalformedBatch(ValueError):
    """A payload that is no batch of KV events. What it said is lost, as if it had not arrived."""


class BlocksStored(Struct, frozen=True, gc=False):
    """Neighbouring blocks of one chain were filled."""

    hashes: list[EngineHash]  # as many as blocks were stored, in order; sparse groups leave some out
    parent: EngineHash | None  # the block before the first of them; None: they begin a chain
    token_ids: TokenBytes
    block_size: int  # tokens
    medium: str | None = None  # where they lie: GPU, CPU, STORAGE; None, from before 0.10.2, is the GPU
    lora_name: str | None = None
    is_lora_unnamed: bool = False  # before 0.14 an adapter has only a number here, which other engines give to others
    extra_keys: list[Any] | None = None  # per block: None, or what else its hash covers (adapter, media, salt)
    group: int | None = None  # KV cache group; None before 0.20
    kind: str | None = None  # of the group's attention; None before 0.22
    window: int | None = None  # tokens that the group's attention sees, where it is a sliding one
    is_report: bool = False  # it was told before, or may have been: one of our own requests has found it in the cache


class BlocksRemoved(Struct, frozen=True, gc=False):
    """One copy of each of these blocks was given away."""

    hashes: list[EngineHash]
    medium: str | None = None
    group: int | None = None


class CacheCleared(Struct, frozen=True, gc=False):
    """The engine's prefix cache was reset."""


Event = BlocksStored | BlocksRemoved | CacheCleared


class EventBatch(Struct, frozen=True):
    """What one engine step changed, in order."""

    events: list[Event]
    rank: int | None  # data-parallel rank; None where the engine does not say
    ignored: int  # events of kinds that are not known here


class EventCounters(Struct):
    """Blocks, by what became of them; batches and events where the name says so."""

    stored: int = 0
    removed: int = 0
    clears: int = 0  # events
    ignored_events: int = 0  # of unknown kinds
    unknown_parents: int = 0  # stored below a block that was never heard of
    unknown_removals: int = 0
    placeholders: int = 0  # without tokens
    mismatches: int = 0  # other block sizes, or token counts that do not fit the hashes
    sparse: int = 0  # of groups that cannot promise a hit
    opaque: int = 0  # media, or adapters without a name
    refused: int = 0  # over the bound
    suspected: int = 0
    confirmed: int = 0
    dropped: int = 0  # suspects that were given up
    learnt: int = 0  # from deliveries


_Hash = int | Annotated[bytes, Meta(max_length=ENGINE_HASH_BYTES_MAX)]


class _StoredMap(Struct, tag="BlockStored", gc=False):
    block_hashes: list[_Hash]
    parent_block_hash: _Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    session_id: str | None = None  # since 0.30, so in maps only


class _RemovedMap(Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[_Hash]
    medium: str | None = None
    group_idx: int | None = None


class _ClearedMap(Struct, tag="AllBlocksCleared", gc=False):
    pass


# The same fields by position, as they were sent until vLLM 0.23.


class _Stored(_StoredMap, array_like=True, tag="BlockStored", gc=False):
    pass


class _Removed(_RemovedMap, array_like=True, tag="BlockRemoved", gc=False):
    pass


class _Cleared(_ClearedMap, array_like=True, tag="AllBlocksCleared", gc=False):
    pass


_Arrays = _Stored | _Removed | _Cleared
_Maps = _StoredMap | _RemovedMap | _ClearedMap


class _ArrayBatch(Struct, array_like=True):
    ts: float
    events: list[_Arrays]
    data_parallel_rank: int | None = None


class _MapBatch(Struct, array_like=True):
    ts: float
    events: list[_Maps]
    data_parallel_rank: int | None = None


class _AnyBatch(Struct, array_like=True):
    ts: float
    events: list[Any]
    data_parallel_rank: int | None = None


_as_arrays = msgspec.msgpack.Decoder(_ArrayBatch).decode
_as_maps = msgspec.msgpack.Decoder(_MapBatch).decode
_as_any = msgspec.msgpack.Decoder(_AnyBatch).decode
_KINDS = {"BlockStored", "BlockRemoved", "AllBlocksCleared"}


def unheard(own: int) -> EngineHash:
    """Name a block of which no event has told, by our hash of it: longer than an engine's name can be."""
    return bytes(ENGINE_HASH_BYTES_MAX) + own.to_bytes(8, "little")


def _is_known(kind: object) -> bool:
    return isinstance(kind, str) and kind in _KINDS  # of another type it may have no hash


def decode_batch(payload: bytes) -> EventBatch:
    """Read one batch, whichever release of vLLM wrote it.

    Raises:
        MalformedBatch: it is none.
    """
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise MalformedBatch(f"{len(payload)} bytes; a batch has at most {PAYLOAD_BYTES_MAX}")
    try:
        batch, ignored = _decoded(payload)
        return EventBatch(_events(batch.events), batch.data_parallel_rank, ignored)
    except (msgspec.MsgspecError, ValueError, OverflowError, RecursionError) as error:
        raise MalformedBatch(f"no batch of KV events: {error}") from None


def _decoded(payload: bytes) -> tuple[_ArrayBatch | _MapBatch, int]:
    """Decode into typed events at once; one by one where there are kinds that are not known, or both forms."""
    decode: Callable[[bytes], _ArrayBatch | _MapBatch] = _as_maps if _begins_with_map(payload) else _as_arrays
    try:
        return decode(payload), 0
    except msgspec.ValidationError:
        loose = _as_any(payload)
    typed: list[Any] = []
    for event in loose.events:
        if isinstance(event, dict) and _is_known(event.get("type")):
            typed.append(msgspec.convert(event, _Maps))
        elif isinstance(event, list) and event and _is_known(event[0]):
            typed.append(msgspec.convert(event, _Arrays))
        elif not isinstance(event, dict | list):
            raise MalformedBatch(f"an event that is a {type(event).__name__}")
    return _ArrayBatch(loose.ts, typed, loose.data_parallel_rank), len(loose.events) - len(typed)


def _begins_with_map(payload: bytes) -> bool:
    """Look at the first event: array head, eight bytes of time behind their own head, array head, event."""
    if len(payload) < 12 or payload[1] != _FLOAT64:
        return True
    at = {_ARRAY16: 13, _ARRAY32: 15}.get(payload[10], 11)
    first = payload[at] if at < len(payload) else 0x80
    return 0x80 <= first <= 0x8F or first in (_MAP16, _MAP32)


def _events(wire: list[Any]) -> list[Event]:
    """Turn events into ours; neighbouring removals from one place, of which vLLM sends one a block, become one."""
    events: list[Event] = []
    gathered: list[Any] | None = None  # hashes of the last event, where that is a removal
    where: tuple[str | None, int | None] = (None, None)
    for one in wire:
        if isinstance(one, _RemovedMap):
            if gathered is not None and where == (one.medium, one.group_idx):
                gathered += one.block_hashes
            else:
                gathered, where = one.block_hashes, (one.medium, one.group_idx)
                events.append(BlocksRemoved(gathered, *where))
            continue
        gathered = None
        events.append(_stored(one) if isinstance(one, _StoredMap) else CacheCleared())
    return events


def _stored(one: Any) -> BlocksStored:
    return BlocksStored(
        one.block_hashes,
        one.parent_block_hash,
        TokenBytes(array("I", one.token_ids).tobytes()),
        one.block_size,
        one.medium,
        one.lora_name,
        one.lora_id is not None and one.lora_name is None,
        one.extra_keys,
        one.group_idx,
        one.kv_cache_spec_kind,
        one.kv_cache_spec_sliding_window,
        one.session_id == REPORT_SESSION and one.parent_block_hash is None,  # what it found begins at the root
    )
