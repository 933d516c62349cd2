"""What a router knows of a shard: replies decoded, writes cut into calls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.index import Namespace
from kvroute.adapters.redis_owner import Write
from kvroute.adapters.redis_shard import PIECE_BLOCKS, Member, Shard, calls, shard_number
from kvroute.kv.residency import Run
from kvroute.routing.replica import ReplicaId

R0, R1 = ReplicaId("r0"), ReplicaId("r1")


@pytest.fixture
def shard() -> Shard:
    one = Shard("prod", Namespace("m.1"), 0)
    for replica, token in ((R0, b"0.1"), (R1, b"9.2")):
        one.members[replica] = Member(replica, 100)
        one.members[replica].token = token
    one.epoch, one.is_ready = b"e", True
    one.read_registry(b"e.1", [b"r0", b"0.1", b"r1", b"9.2", b"stranger", b"3.3"])
    return one


def test_keys_of_a_shard_share_a_hash_tag(shard):
    """Deployment, namespace and shard number are in the tag, so that a cluster keeps them together."""
    assert shard.prefix == b"{kvr:v1:prod:m.1:0}"


def test_deeper_sets_come_first(shard):
    """A lookup's reply gives each member the depth of the first set that it is in; strangers' slots are passed over."""
    holding: dict[ReplicaId, int] = {}
    reply = [b"e.1", None, 5, None, 70, b"\x01\x02", 30, b"\x00\x0b\x02"]
    assert shard.read_lookup(reply, holding) == 5
    assert holding == {R1: 70, R0: 30}


def test_what_a_hybrid_holds_counts_up_to_an_end(shard):
    """Where a lookup names ends, a hybrid holds no more than up to its own, and nothing where it has none; others are
    left as they are. What ends are named for is a hybrid until they are no more."""
    for ends, expected in (([0, 12], {R1: 70, R0: 12}), ([9, 64, 0, 0], {R1: 64}), ([0, 40, 3, 1], {R1: 70, R0: 30})):
        holding: dict[ReplicaId, int] = {}
        shard.read_lookup([b"e.1", None, 5, ends, 70, b"\x01\x02", 30, b"\x00\x0b\x02"], holding)
        assert holding == expected
        assert shard.hybrids == {shard.replicas[slot] for slot in ends[::2]} - {None}
    shard.read_lookup([b"e.1", None, 5, None], {})
    assert not shard.hybrids


def test_another_epoch_is_not_understood(shard):
    """A reply of another epoch says that Redis is another one: it is not used, and the shard is not ready."""
    assert shard.read_lookup([b"f.1", [], 1, None, 5, b"\x00\x01"], {}) is None
    assert not shard.is_ready


def test_another_life_is_nobody(shard):
    """When the registry says that a replica began a new life, bits are not credited to the one that we know."""
    holding: dict[ReplicaId, int] = {}
    shard.read_lookup([b"e.2", [b"r0", b"4.5", b"r1", b"9.2"], 1, None, 5, b"\x00\x11\x02"], holding)
    assert holding == {R1: 5}


@pytest.mark.parametrize(
    "reply",
    [
        *(None, 7, b"OK", [], [b"e.1"], [7, None, 1], [b"e.1", None, b"x"], [b"e.2", 7, 1], [b"e.2", [b"r0"], 1]),
        *([b"e.1", None, 1], [b"e.1", None, 1, 5], [b"e.1", None, 1, [0]], [b"e.1", None, 1, [b"x", 1]]),
        *([b"e.1", None, 1, None, b"x", b"\x00\x01"], [b"e.1", None, 1, None, 0, b"\x00\x01"]),
        *([b"e.1", None, 1, None, 5, 7], [b"e.1", None, 1, None, 5, b""], [b"e.1", None, 1, None, 5, b"\xff\x01"]),
    ],
    ids=repr,
)
def test_what_is_no_answer_is_refused(shard, reply):
    """A reply that lookup.lua cannot have given raises what the index expects, and changes no registry."""
    tokens = dict(shard.tokens)
    with pytest.raises((AttributeError, LookupError, TypeError, ValueError)):
        shard.read_lookup(reply, {})
    assert (shard.tokens, shard.version) == (tokens, b"e.1")


def test_replicas_spread_over_shards():
    """A replica's shard is a matter of its name alone, and replicas use all of them."""
    numbers = [shard_number(ReplicaId(f"http://10.0.0.{i}:8000"), 4) for i in range(100)]
    assert set(numbers) == {0, 1, 2, 3}
    assert shard_number(R0, 1) == 0


@given(st.lists(st.tuples(st.sampled_from([b"+", b"-"]), st.integers(1, 1500)), max_size=12))
def test_no_call_writes_too_much(sizes):
    """Cut into calls, writes keep their order and their blocks, and no call has more than a call may write."""
    writes = [Write(op, Run(n % 16, bytes([i]) * 8 * (n + n % 16))) for i, (op, n) in enumerate(sizes)]
    cut = calls(writes)
    assert all(0 < sum(len(write.run) for write in call) <= PIECE_BLOCKS for call in cut)
    together: dict[bytes, tuple[bytes, int]] = {}
    for write in (write for call in cut for write in call):
        name = write.run.hashes[:1]
        together[name] = (write.op, together.get(name, (b"", 0))[1] + len(write.run))
    assert list(together.values()) == [(write.op, len(write.run)) for write in writes]


def test_long_runs_are_cleared_from_their_tail():
    """A long run is cleared from its tail, so that what is left is a prefix at every moment."""
    run = Run(0, b"".join(i.to_bytes(8, "little") for i in range(600)))
    first, *_, last = (write.run.hashes[:8] for call in calls([Write(b"-", run)]) for write in call)
    assert int.from_bytes(first, "little") > int.from_bytes(last, "little") == 0
