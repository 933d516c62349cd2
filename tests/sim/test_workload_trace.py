"""Traces in Mooncake's layout."""

from __future__ import annotations

import json
from itertools import repeat
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.trace_files import Spool
from kvroute.errors import ConfigError
from kvroute.kv.chain import HASH_BYTES, blocks_in, hashes_of
from kvroute.sim.workload_trace import Naming, Row, Trace, infer_block_size, read_row


def row(tokens, ids, **more):
    return Row(input_length=tokens, hash_ids=ids, **more)


def played(rows, naming, how="by_timestamp"):
    with Spool(json.dumps(one).encode() for one in rows) as spool:
        trace = Trace(spool, naming)
        workload = trace.by_timestamp() if how == "by_timestamp" else trace.by_session(repeat(0.0), 300.0)
        return [(script.start_s, list(script.turns)) for script in workload]


@given(st.integers(1, 700), st.integers(1, 400), st.integers(0, 3000), st.integers(0, 3000))
def test_prompts_share_what_their_ids_share_in_blocks_of_any_size(trace_block, block_size, length, common):
    """Of two prompts that are equal up to some whole block of the trace, exactly the blocks within that are equal."""
    common = min(common, length) // trace_block
    count = ceil(length / trace_block)
    naming = Naming(trace_block, block_size)
    one = naming.chain(row(length, list(range(count))), "")
    other = naming.chain(row(length, [*range(common), *range(10_000, 10_000 + count - common)]), "")
    equal = [a == b for a, b in zip(hashes_of(one), hashes_of(other), strict=True)]
    assert len(equal) == length // block_size
    assert sum(equal) == (len(equal) if common == count else common * trace_block // block_size)
    assert len(set(hashes_of(one))) == len(equal)


def test_runs_are_the_same_as_ids():
    """Run-length coded ids name the same blocks."""
    naming = Naming(64, 16)
    runs = Row(input_length=640, hash_runs=[(7, 3), (100, 7)])
    assert naming.chain(runs, "") == naming.chain(row(640, [7, 8, 9, *range(100, 107)]), "")
    assert row(640, [7, 8, 9, *range(100, 107)]).runs == [(7, 3), (100, 7)]


@pytest.mark.parametrize("session", [{}, {"offset_ms": 0.0, "model": "m"}])
@pytest.mark.parametrize("block_size", [16, 64, 256, 48])
def test_ids_may_be_hashes(block_size, session):
    """Ids of 64 bits, and negative ones, share as small ones do; some traces name blocks by their hashes."""
    naming = Naming(64, block_size)
    large = [-1, 0, -(1 << 63), (1 << 64) - 1, (1 << 63) - 1, 1 << 63, 5, 1 << 60, 1 << 58]
    one = naming.chain(row(64 * 9, large, **session), "s")
    other = naming.chain(row(64 * 9, [*large[:6], *range(3)], **session), "s")
    equal = [a == b for a, b in zip(hashes_of(one), hashes_of(other), strict=True)]
    assert equal == [True] * (6 * 64 // block_size) + [False] * (9 * 64 // block_size - 6 * 64 // block_size)
    assert len(set(hashes_of(one))) == len(equal) == 9 * 64 // block_size


def test_of_more_ids_than_blocks_the_first_count():
    """A line that names a hundred million blocks for a short prompt takes no more memory than its prompt has blocks."""
    naming = Naming(64, 16)
    assert naming.chain(Row(input_length=640, hash_runs=[(7, 100_000_000)]), "") == naming.chain(
        row(640, list(range(7, 17))), ""
    )
    assert len(naming.chain(Row(input_length=640, hash_runs=[(1 << 62, 100_000_000)]), "")) == 40 * HASH_BYTES


@pytest.mark.parametrize("block", [16, 64, 512, 48])
@pytest.mark.parametrize("rounding", [ceil, int])
def test_a_traces_block_size_shows_in_its_counts(block, rounding):
    """Lengths and counts of ids tell the block size, whether or not a partial block has an id."""
    lengths = [*range(block, 40 * block, 37), 40 * block, 40 * block + 1, 40 * block - 1]
    assert infer_block_size(row(n, list(range(rounding(n / block)))) for n in lengths) == block


def test_traces_without_ids_have_no_block_size():
    """Lengths alone are a trace as well; counts that no size explains are an error that names the option."""
    assert infer_block_size([Row(input_length=100)]) is None
    with pytest.raises(ConfigError, match="--trace-block"):
        infer_block_size([row(100, [1, 2]), row(100_000, [1]), row(10, list(range(10)))])


def test_the_next_prompt_names_an_answers_blocks():
    """What a prompt and its answer left in a cache is hit by the session's next prompt."""
    rows = [
        {"timestamp": 0, "input_length": 40, "output_length": 30, "hash_ids": [0, 1, 2], "session_id": "s"},
        {"timestamp": 5000, "input_length": 90, "output_length": 1, "hash_ids": [0, 1, 3, 4, 5, 6], "session_id": "s"},
    ]
    (_, [first]), (at_s, [second]) = played(rows, Naming(16, 16))
    assert at_s == 5.0
    assert (blocks_in(first.chain), blocks_in(second.chain)) == (4, 5)
    assert second.chain.startswith(first.chain)


def test_a_prompt_that_does_not_go_on_shares_no_answer():
    """Where the next prompt of a session is another text, the answer's blocks are nobody else's."""
    rows = [
        {"timestamp": 0, "input_length": 32, "output_length": 32, "hash_ids": [0, 1], "session_id": "s"},
        {"timestamp": 1, "input_length": 96, "output_length": 1, "hash_ids": [0, 7, 8, 9, 10, 11], "session_id": "s"},
    ]
    (_, [first]), (_, [second]) = played(rows, Naming(16, 16))
    shared = [a == b for a, b in zip(hashes_of(first.chain), hashes_of(second.chain), strict=False)]
    assert shared == [True, False, False, False]


def test_requests_without_ids_share_nothing():
    """Lengths alone still fill a cache, each request with blocks of its own."""
    rows = [{"timestamp": n, "input_length": 32, "output_length": 16} for n in range(2)]
    (_, [one]), (_, [other]) = played(rows, Naming(0, 16))
    assert len(set(hashes_of(one.chain)) | set(hashes_of(other.chain))) == 6


def test_sessions_are_played_with_their_pauses_and_their_sub_sessions():
    """A sub-session starts as long after its family as it did; ids of different families are different blocks."""
    common = {"input_length": 64, "output_length": 1, "hash_ids": [0], "model": "m", "tool_tokens": 0}
    rows = [
        {"session_id": "a", "offset_ms": 0, "think_ms": 0, **common},
        {"session_id": "a.1", "offset_ms": 5000, "think_ms": 0, **common},
        {"session_id": "a", "offset_ms": 9000, "think_ms": 2000, **common},
        {"session_id": "b", "offset_ms": 0, "think_ms": 400_000, **common},
    ]
    found = played(rows, Naming(64, 64), "by_session")
    assert [(at, [turn.think_s for turn in sent]) for at, sent in found] == [(0, [0, 2.0]), (0, [300.0]), (5.0, [0])]
    firsts = [sent[0].chain[:HASH_BYTES] for _, sent in found]
    assert firsts[0] == firsts[2] != firsts[1]


def test_sessions_share_equal_tool_lists():
    """Sessions whose tools are equally long begin with the same blocks, unless told otherwise."""
    fields = {"offset_ms": 0.0, "model": "m", "tool_tokens": 40}
    one, other = row(64, [0, 1, 2, 3], **fields), row(64, [5, 6, 7, 8], **fields)
    for shares, equal in ((True, [True, True, False, False]), (False, [False] * 4)):
        naming = Naming(16, 16, shares)
        chains = hashes_of(naming.chain(one, "a")), hashes_of(naming.chain(other, "b"))
        assert [a == b for a, b in zip(*chains, strict=True)] == equal


@pytest.mark.parametrize(
    "line",
    [
        b"{}",
        b"[]",
        b'{"input_length": 0}',
        b'{"input_length": 5, "output_length": -1}',
        b'{"input_length": "5"}',
        b'{"input_length": 5, "hash_runs": [[0, 0]]}',
        b'{"input_length": 5, "hash_runs": [[-1, 2]]}',
    ],
)
def test_lines_that_are_no_requests_are_refused(line):
    """The error shows the line."""
    with pytest.raises(ConfigError) as raised:
        read_row(line)
    assert raised.value.message.endswith(line.decode())


def test_of_a_long_line_its_beginning_is_shown():
    """An error stays readable."""
    line = b'{"input_length": 0, "hash_ids": [' + b"1, " * 1000 + b"1]}"
    with pytest.raises(ConfigError) as raised:
        read_row(line)
    assert raised.value.message.endswith("...")
    assert len(raised.value.message) < 250


@pytest.mark.parametrize("how", ["by_timestamp", "recorded"])
def test_a_trace_begins_with_its_first_request(how):
    """Timestamps may be those of any clock, an epoch's too; nothing is played before the first."""
    at_ms = [1.7e12 + 4000, 1.7e12, 1.7e12 + 1500, -20.0]
    rows = [{"timestamp": at, "input_length": 5, "session_id": f"s{at}"} for at in at_ms[:3]]
    with Spool(json.dumps(one).encode() for one in rows) as spool:
        trace = Trace(spool, Naming(0, 16))
        work = trace.by_timestamp() if how == "by_timestamp" else trace.by_session(None, 300.0)
        assert [script.start_s for script in work] == [0.0, 1.5, 4.0]
    with Spool(json.dumps({"timestamp": at, "input_length": 5}).encode() for at in at_ms) as spool:
        trace = Trace(spool, Naming(0, 16))
        with pytest.raises(ConfigError, match="milliseconds"):
            list(trace.by_timestamp() if how == "by_timestamp" else trace.by_session(None, 300.0))


def test_an_open_loop_needs_timestamps():
    """Traces without a clock are refused with the remedy."""
    with pytest.raises(ConfigError, match="--starts"):
        played([{"offset_ms": 0, "input_length": 5, "session_id": "s"}], Naming(0, 16))
