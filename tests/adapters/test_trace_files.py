"""Spooled traces."""

from __future__ import annotations

import gzip
import json

import pytest

from kvroute.adapters.trace_files import Spool, Steps, lines_of
from kvroute.errors import ConfigError

ROWS = [
    {"session_id": "b", "timestamp": 3000, "input_length": 10},
    {"session_id": "a", "timestamp": 0, "input_length": 20},
    {"session_id": "a", "timestamp": 3000, "input_length": 300},
    {"timestamp": 0, "input_length": 5},
]


def spool(rows, **options):
    return Spool((json.dumps(row).encode() for row in rows), **options)


def lengths(lines):
    return [None if line is None else json.loads(line)["input_length"] for line in lines]


def test_lines_come_by_time_with_what_follows_in_their_session():
    """Requests are played in the order of time, whatever the file's, and each knows the next turn."""
    with spool(ROWS) as trace:
        assert [lengths(pair) for pair in trace.by_time()] == [[20, 300], [5, None], [10, None], [300, None]]
        assert lengths(trace.lines("a")) == [20, 300]


def test_families_hold_their_sub_sessions_where_sessions_have_clocks_of_their_own():
    """With offsets, what stands before a name's dot is the family; a seed shuffles families, always alike."""
    rows = [{"session_id": name, "offset_ms": 0} for name in ("a", "a.1", *(f"s{n}" for n in range(20)))]
    with spool(rows) as trace:
        assert list(trace.families(None))[:2] == ["a", "s0"]
        assert list(trace.sessions("a")) == ["a", "a.1"]
        assert list(trace.families(1)) == list(trace.families(1)) != list(trace.families(2))
        assert sorted(trace.families(1)) == sorted(trace.families(None))


def test_families_with_a_prompt_that_is_too_long_are_left_out():
    """What could not be served is not played at all."""
    with spool(ROWS, longest_tokens=100) as trace:
        assert (len(trace), list(trace.families(None))) == (2, ["#3", "b"])


def test_coarse_timestamps_are_noticed():
    """Requests that share a stamp show how wide its step is."""
    with spool([{"timestamp": 3000 * (n // 10)} for n in range(100)]) as coarse:
        assert (coarse.steps(), coarse.steps().is_coarse) == (Steps(3.0, 10.0), True)
    with spool([{"timestamp": 40 * n} for n in range(100)]) as fine:
        assert not fine.steps().is_coarse
    with spool([{}, {}]) as none:
        assert not none.steps().is_coarse


def test_files_are_read_plain_or_packed(tmp_path):
    """A name that ends in .gz is unpacked; empty lines are skipped."""
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_bytes(b'{"a":1}\n\n{"b":2}\n')
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert list(lines_of(plain)) == list(lines_of(packed)) == [b'{"a":1}', b'{"b":2}']


@pytest.mark.parametrize(
    ("name", "data"), [("none", None), ("t.gz", b"not packed"), ("cut.gz", gzip.compress(b"x\n", mtime=0)[:-4])]
)
def test_files_that_cannot_be_read_are_named(tmp_path, name, data):
    """The error says which file."""
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(ConfigError, match=name):
        list(lines_of(tmp_path / name))


def test_lines_that_are_no_objects_are_numbered():
    """The error says which line."""
    with pytest.raises(ConfigError, match=r"line 2.*nonsense"):
        Spool([b"{}", b"nonsense"])


@pytest.mark.parametrize("name", ["t.jsonl", "t.jsonl.gz"])
def test_a_byte_order_mark_is_no_part_of_the_first_line(name, tmp_path):
    """Files written on Windows can be played."""
    text = b'\xef\xbb\xbf{"input_length": 1}\r\n\r\n{"input_length": 2}\r\n'
    (tmp_path / name).write_bytes(gzip.compress(text) if name.endswith(".gz") else text)
    assert lengths(lines_of(tmp_path / name)) == [1, 2]
