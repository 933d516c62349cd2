"""Every release's form of KV events is read alike, what is new is skipped, and what is broken says so."""

from __future__ import annotations

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.chain import tokens_of
from kvroute.kv.events import (
    PAYLOAD_BYTES_MAX,
    BlocksRemoved,
    BlocksStored,
    CacheCleared,
    MalformedBatch,
    decode_batch,
)
from tests.kv.encoded import DATA, RELEASES, cleared, encoded, payloads, recorded, removed, stored

hashes = st.one_of(st.integers(-(2**63), 2**64 - 1), st.binary(min_size=16, max_size=32))


@pytest.mark.parametrize("release", RELEASES)
def test_every_release_says_the_same(release):
    """A stored, a removed and a cleared event decode to the same values, but for fields that a release lacks."""
    events = [stored([1, 2], 7, [3, 4, 5, 6], 2, lora_name="a", lora_id=1), removed(9), cleared()]
    first, second, third = decode_batch(encoded(events, release)).events
    assert (first.hashes, first.parent, first.token_ids, first.block_size) == ([1, 2], 7, tokens_of([3, 4, 5, 6]), 2)
    assert (second.hashes, type(third)) == ([9], CacheCleared)
    assert (first.medium, first.lora_name, first.is_lora_unnamed) == (
        "GPU" if release >= 10 else None,
        "a" if release >= 14 else None,
        release < 14,
    )
    assert (first.extra_keys, first.group) == ([None, None] if release >= 18 else None, 0 if release >= 20 else None)
    assert first.kind == ("full_attention" if release >= 22 else None)


@pytest.mark.parametrize("name", sorted(path.stem for path in DATA.glob("*.json")))
def test_recordings_of_a_real_engine(name):
    """What a real engine sent is read as another reader of msgpack reads it."""
    recording = recorded(name)
    for payload, message in zip(payloads(recording), recording["messages"], strict=True):
        batch = decode_batch(payload)
        _, expected, rank = message["batch"]
        shown = [one for one in expected if one["type"] == "BlockStored"]
        found = [one for one in batch.events if isinstance(one, BlocksStored)]
        assert (batch.rank, batch.ignored) == (rank, 0)
        assert [one.token_ids for one in found] == [tokens_of(one["token_ids"]) for one in shown]
        assert [one.kind for one in found] == [one["kv_cache_spec_kind"] for one in shown]
        assert [one.hashes for one in found] == [[as_hash(h) for h in one["block_hashes"]] for one in shown]
        gone = [h for one in batch.events if isinstance(one, BlocksRemoved) for h in one.hashes]
        assert gone == [as_hash(h) for one in expected if one["type"] == "BlockRemoved" for h in one["block_hashes"]]


def as_hash(shown):
    return bytes.fromhex(shown["bytes"]) if isinstance(shown, dict) else shown


@given(st.lists(hashes, max_size=4), st.none() | hashes, st.sampled_from(RELEASES), st.sampled_from([None, 0, 3]))
def test_hashes_are_whatever_the_engine_sends(found, parent, release, rank):
    """Integers, negative or beyond 63 bits, and bytes come through as they are, with a rank or without."""
    batch = decode_batch(encoded([stored(found, parent, [], 16), removed(*found)], release, rank))
    assert [event.hashes for event in batch.events] == [found, found]
    assert (batch.events[0].parent, batch.rank) == (parent, rank)


def test_neighbouring_removals_become_one():
    """Removals from one place are gathered; another group, another medium or another event begins anew."""
    events = [removed(1), removed(2), removed(3, group_idx=1), removed(4, medium="CPU"), cleared(), removed(5)]
    found = decode_batch(encoded(events)).events
    assert [getattr(event, "hashes", None) for event in found] == [[1, 2], [3], [4], None, [5]]


@pytest.mark.parametrize("kind", [["x"], {}, 7, None, b"BlockStored"])
def test_a_kind_of_another_type_is_skipped(kind):
    """What stands where a kind should may be anything: it is counted, and the rest is read."""
    for odd, release in (([kind, 1], 23), ({"type": kind}, 32)):
        batch = msgspec.msgpack.decode(encoded([removed(1)], release))
        batch[1].append(odd)
        found = decode_batch(msgspec.msgpack.encode(batch))
        assert ([event.hashes for event in found.events], found.ignored) == ([[1]], 1)


@pytest.mark.parametrize("known", [stored([1], None, [5], 1), removed(1)])
@pytest.mark.parametrize("release", [23, 32])
def test_the_future_is_skipped(known, release):
    """Unknown fields and trailing positions are ignored; unknown kinds are counted and the rest is read."""
    batch = msgspec.msgpack.decode(encoded([known], release))
    event = batch[1][0]
    batch[1][0] = event | {"later": [1]} if isinstance(event, dict) else [*event, *[None] * 9, "later", 7]
    batch[1].append({"type": "BlockMoved", "to": 4} if release >= 24 else ["BlockMoved", 4])
    found = decode_batch(msgspec.msgpack.encode([*batch, "more"]))
    assert (len(found.events), found.events[0].hashes, found.ignored) == (1, [1], 1)


def test_both_forms_in_one_batch():
    """Each event is read in the form that it has."""
    old, new = (msgspec.msgpack.decode(encoded([removed(n)], release))[1] for n, release in ((1, 23), (2, 32)))
    found = decode_batch(msgspec.msgpack.encode([1.0, old + new, 0])).events
    assert [event.hashes for event in found] == [[1, 2]]


@pytest.mark.parametrize(
    "batch",
    [
        7,
        [],
        [1.0],
        [1.0, 5],
        [1.0, [5]],
        [1.0, [["BlockStored", [1], None, ["a"], 16]]],
        [1.0, [["BlockStored", [1], None, [-1], 16]]],
        [1.0, [["BlockStored", [1], None, [2**32], 16]]],
        [1.0, [{"type": "BlockRemoved"}]],
        [1.0, [{"type": "BlockRemoved", "block_hashes": [1.5]}]],
    ],
)
def test_what_is_no_batch_is_refused(batch):
    """Other types, missing fields and token ids that cannot be are one error."""
    with pytest.raises(MalformedBatch):
        decode_batch(msgspec.msgpack.encode(batch))


def test_a_payload_without_end_is_refused():
    """A payload larger than any step's is not even decoded; one nested without end does no harm."""
    with pytest.raises(MalformedBatch):
        decode_batch(bytes(PAYLOAD_BYTES_MAX + 1))
    with pytest.raises(MalformedBatch):
        decode_batch(b"\x92\xcb" + bytes(8) + b"\x91" * 100_000)


@given(st.binary(max_size=200))
def test_noise_is_refused(noise):
    """Bytes of any kind give a batch or MalformedBatch, nothing else."""
    decoded_or_refused(noise)


@given(st.data(), st.sampled_from(RELEASES))
def test_damage_is_refused(data, release):
    """So does a batch in which some bytes were changed, or of which the end is missing."""
    payload = bytearray(encoded([stored([1, b"x" * 32], None, [1, 2], 1), removed(2), cleared()], release))
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    decoded_or_refused(bytes(payload))
    decoded_or_refused(bytes(payload[: data.draw(st.integers(0, len(payload)))]))


def decoded_or_refused(payload):
    with contextlib.suppress(MalformedBatch):
        decode_batch(payload)
