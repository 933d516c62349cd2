"""Traces in Mooncake's layout: lengths and block ids, one request a line of JSON.

`hash_ids` name prompt blocks from the left; an id stands for its block and all before it (Mooncake, FAST '25, trace
format). `hash_runs` are the same ids as [first, count] pairs. The trace's block size is in no field, so it is inferred
from lengths and counts; blocks of any other size are named exactly as far as the trace can tell them apart:

    the block that ends with token e of the prompt is named  id of the trace's block around e, times its size, plus e's
    place in it

Where the session's next prompt goes on behind this one's answer, the answer's blocks get the names that it has there.
What no id covers (tails of traces that hash whole blocks only, answers that nobody continues, traces without ids) gets
names of its own: it fills the cache, and nobody hits it.

This file does not know where lines come from: a `Source` hands them out, by time or by session.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from math import ceil, floor
from random import Random
from typing import Protocol

import msgspec
from msgspec import Struct

from kvroute.errors import ConfigError, excerpt
from kvroute.kv.chain import HASH_BYTES
from kvroute.sim.workload import Script, Turn, Workload, name_of, padded

BLOCK_SIZE_MAX = 65_536
TOKENS_MAX = 100_000_000
SPAN_S_MAX = 10_000_000  # from a trace's first request to its last: four months
SCAN_ROWS = 200  # from which the block size is inferred
NAMES_END = 1 << 62  # ids times the trace's block size, up to which they are names as they are: sums stay in 64 bits
Runs = list[tuple[int, int]]


class Row(Struct):
    """One request as a trace states it. Unknown fields are ignored."""

    input_length: int
    output_length: int = 1
    timestamp: float | None = None  # ms, on any clock: the trace begins with its first request
    offset_ms: float | None = None  # ms from the start of its family's first session, where there is no common clock
    hash_ids: list[int] | None = None
    hash_runs: list[tuple[int, int]] | None = None
    session_id: str | int | None = None
    model: str | None = None
    think_ms: float | None = None
    delay_ms: float | None = None
    tool_tokens: int = 0

    @property
    def runs(self) -> Runs:
        """The block ids as (first, count) pairs."""
        if self.hash_runs is not None:
            return self.hash_runs
        runs: Runs = []
        first = count = 0
        for one in self.hash_ids or ():
            if count and one == first + count:
                count += 1
                continue
            if count:
                runs.append((first, count))
            first, count = one, 1
        return [*runs, (first, count)] if count else runs

    @property
    def blocks(self) -> int:
        """How many block ids there are."""
        return len(self.hash_ids) if self.hash_ids is not None else sum(count for _, count in self.hash_runs or ())

    @property
    def think_s(self) -> float:
        """Recorded pause before the request."""
        return (self.think_ms if self.think_ms is not None else self.delay_ms or 0.0) / 1000


class Source(Protocol):
    """A trace's lines, in any order that playing it asks for. Lines of a session come in the order of their times."""

    def by_time(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield every line, and the next of its session."""

    def families(self, seed: int | None) -> Iterator[str]:
        """Yield the names of families (sessions with their sub-sessions) by time, or shuffled if there is a seed."""

    def sessions(self, family: str) -> Sequence[str]:
        """Return a family's sessions."""

    def lines(self, session: str) -> Iterator[bytes]:
        """Yield a session's lines."""


_decode = msgspec.json.Decoder(Row).decode


def read_row(line: bytes) -> Row:
    """Decode a line.

    Raises:
        ConfigError: it is no request of a trace.
    """
    try:
        row = _decode(line)
    except msgspec.DecodeError as error:
        raise ConfigError(f"a line is no request: {error}; see docs/simulating.md: {excerpt(line)}") from None
    if not 0 < row.input_length <= TOKENS_MAX or not 0 <= row.output_length <= TOKENS_MAX:
        sizes = f"input_length from 1 and output_length from 0 to {TOKENS_MAX:,} tokens"
        raise ConfigError(f"a request needs {sizes}: {excerpt(line)}")
    if row.hash_runs is not None and not all(first >= 0 and 0 < count <= TOKENS_MAX for first, count in row.hash_runs):
        raise ConfigError(f"`hash_runs` are pairs of a first id and a count: {excerpt(line)}")
    return row


def infer_block_size(rows: Iterable[Row]) -> int | None:
    """Return the block size that explains how many ids requests of their lengths have; None where there are no ids.

    Raises:
        ConfigError: no size does.
    """
    low, high, seen = 1, BLOCK_SIZE_MAX, False
    for row in rows:
        if not row.blocks:
            if row.hash_ids is not None or row.hash_runs is not None:
                low = max(low, row.input_length + 1)
                seen = True
            continue
        seen = True
        low = max(low, floor(row.input_length / (row.blocks + 1)) + 1)  # whole blocks only: blocks = floor(n / size)
        most = row.input_length if row.blocks == 1 else ceil(row.input_length / (row.blocks - 1)) - 1
        high = min(high, max(most, 1) if row.blocks > 1 else BLOCK_SIZE_MAX)
    if not seen:
        return None
    if low > high:
        raise ConfigError("no block size explains the counts of `hash_ids`: give it with --trace-block")
    return _roundest(low, high)


def _roundest(low: int, high: int) -> int:
    """Return the number between two that is divisible by the largest power of two, the smallest of these."""
    step = 1 << high.bit_length()
    while -(-low // step) * step > high:
        step >>= 1
    return -(-low // step) * step


class Naming(Struct, frozen=True):
    """How block ids become names."""

    trace_block: int  # tokens in a block of the trace; 0 = it has no ids
    block_size: int  # tokens in a block of the simulation
    shares_tools: bool = True  # sessions whose tool lists have one length share them, where ids are a session's own

    def chain(self, row: Row, family: str) -> bytes:
        """Return the names of a prompt's whole blocks, as far as ids go."""
        if not self.trace_block:
            return b""
        tokens = min(row.input_length, row.blocks * self.trace_block)
        return self._cut(self._based(row, family), tokens // self.block_size)

    def _based(self, row: Row, family: str) -> Runs:
        """Return runs of names, one for each block of the prompt in the trace, `trace_block` apart."""
        size = self.trace_block
        blocks = min(row.blocks, -(-row.input_length // size))  # a line may name more than its prompt has
        base = 0 if row.offset_ms is None else name_of("session", family, row.model or "")
        runs = [
            (base + start, many)
            for first, count in _first(row.runs, blocks)
            for start, many in _numbered(first, count, size)
        ]
        if row.offset_ms is None:
            return runs
        shared = min(row.tool_tokens // size, blocks) if self.shares_tools else 0
        if not shared:
            return runs
        return [(name_of("tools", row.model or "", row.tool_tokens), shared), *_without(runs, shared, size)]

    def _cut(self, runs: Runs, blocks: int) -> bytes:
        size, own = self.trace_block, self.block_size
        names = array("Q")
        if size % own == 0:
            for start, count in runs:
                names.extend(range(start + own - 1, start + count * size, own))
            return names[:blocks].tobytes()
        for start, count in runs:
            names.extend(range(start, start + count * size, size))
        if own % size == 0:
            every = own // size
            return names[every - 1 :: every][:blocks].tobytes()
        ends = range(own - 1, blocks * own, own)
        return array("Q", [names[end // size] + end % size for end in ends]).tobytes()

    def turn(self, row: Row, after: Row | None, number: int, family: str, think_s: float = 0.0) -> Turn:
        """Return the request of a row, its answer's blocks named as in the session's next prompt if that goes on."""
        chain = self.chain(row, family)
        output_tokens = max(row.output_length, 1)
        tokens = row.input_length + output_tokens
        if after is not None and self.trace_block and after.input_length >= tokens:
            later = self.chain(after, family)
            common = row.input_length // self.trace_block * self.trace_block // self.block_size * HASH_BYTES
            common = min(common, len(chain))
            if later[:common] == chain[:common]:
                chain = later
        return Turn(
            padded(chain, tokens, self.block_size, name_of("own", number)), row.input_length, output_tokens, think_s
        )


def _numbered(first: int, count: int, size: int) -> Runs:
    """Return names, `size` apart, for ids that follow each other: ids times `size`, or numbers that stand for them."""
    if first >= 0 and (first + count) * size <= NAMES_END:
        return [(first * size, count)]
    return [(name_of("id", each) >> 1, 1) for each in range(first, first + count)]


def _first(runs: Runs, blocks: int) -> Runs:
    """Return the first `blocks` blocks of some runs."""
    kept: Runs = []
    for start, count in runs:
        if blocks <= 0:
            break
        kept.append((start, min(count, blocks)))
        blocks -= count
    return kept


def _without(runs: Runs, blocks: int, size: int) -> Runs:
    """Drop the first `blocks` blocks of some runs."""
    kept: Runs = []
    for start, count in runs:
        gone = min(blocks, count)
        blocks -= gone
        if count > gone:
            kept.append((start + gone * size, count - gone))
    return kept


class Trace(Struct, frozen=True):
    """A trace that can be played, again and again."""

    source: Source
    naming: Naming

    def by_timestamp(self) -> Workload:
        """Play every request at its time: an open loop.

        Raises:
            ConfigError: a line has no timestamp.
        """
        begin_ms: float | None = None
        for number, (line, after) in enumerate(self.source.by_time()):
            row = read_row(line)
            if row.timestamp is None:
                raise ConfigError("the trace has no `timestamp`s: play its conversations, with --think or --starts")
            begin_ms = row.timestamp if begin_ms is None else begin_ms
            later = None if after is None else read_row(after)
            turn = self.naming.turn(row, later, number, str(row.session_id))
            yield Script(_since_s(begin_ms, row.timestamp), iter((turn,)))

    def by_session(self, starts: Iterator[float] | None, think_cap_s: float, shuffle: int | None = None) -> Workload:
        """Play whole conversations; the k-th family begins at the k-th of `starts`, or at its own first timestamp.

        A sub-session begins as long after its family's start as it did, pauses over `think_cap_s` cut out.
        """
        later: list[tuple[float, int, Iterator[Turn]]] = []
        number = 0
        begin_ms: float | None = None
        for family in self.source.families(shuffle):
            if starts is None:
                first_ms = self._first_ms(family)
                begin_ms = first_ms if begin_ms is None else begin_ms
                start_s = _since_s(begin_ms, first_ms)
            else:
                start_s = next(starts)
            while later and later[0][0] <= start_s:
                at_s, _, turns = heappop(later)
                yield Script(at_s, turns)
            for session in self.source.sessions(family):
                number += 1
                first = read_row(next(self.source.lines(session)))
                offset_s = min((first.offset_ms or 0.0) / 1000, think_cap_s)
                turns = self._turns(session, family, think_cap_s)
                heappush(later, (start_s + offset_s, number, turns))
        while later:
            at_s, _, turns = heappop(later)
            yield Script(at_s, turns)

    def _first_ms(self, family: str) -> float:
        firsts = (read_row(next(self.source.lines(session))).timestamp for session in self.source.sessions(family))
        return min(at or 0.0 for at in firsts)

    def _turns(self, session: str, family: str, think_cap_s: float) -> Iterator[Turn]:
        lines = self.source.lines(session)
        line = next(lines, None)
        row = None if line is None else read_row(line)
        number = name_of(session)
        while row is not None:
            line = next(lines, None)
            after = None if line is None else read_row(line)
            number += 1
            yield self.naming.turn(row, after, number, family, min(row.think_s, think_cap_s))
            row = after


def _since_s(begin_ms: float, at_ms: float) -> float:
    """Return how long after a trace's beginning something comes.

    Raises:
        ConfigError: that is too long to be meant.
    """
    since_s = (at_ms - begin_ms) / 1000
    if not since_s <= SPAN_S_MAX:
        raise ConfigError(
            f"a request comes {since_s:.6g} s after the first one, at the most {SPAN_S_MAX:,} s can be played: "
            "`timestamp`s are in milliseconds"
        )
    return since_s


def even_starts(rate_s: float, rng: Random) -> Iterator[float]:
    """Yield the times of a Poisson process of `rate_s` a second."""
    at_s = 0.0
    while True:
        at_s += rng.expovariate(rate_s)
        yield at_s
