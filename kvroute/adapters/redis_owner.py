"""The owner of a replica: turns what all routers sent to it into what it must have evicted.

Every router writes the bits of what it sends at once and appends the chain to the replica's log. One router, the owner,
replays that log into a Residency and clears the bits that no longer fit. Pure: records in, writes out; `redis_index`
reads the log and executes the writes.

Order. Redis executes a sender's write and its log entry together. A block can be sent again between the owner's
decision to clear it and the clearing. So whatever a record stores is written again by the owner when its blocks were
cleared after the record was logged: by this batch (`cleared`), or by the last one (`clean_after`). Once the log has
been replayed and the writes were executed, the bits are exactly the Residency.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

from msgspec import Struct

from kvroute.kv.chain import HASH_BYTES, PrefixChain
from kvroute.kv.residency import GROUP_BLOCKS, Residency, Run, common_bytes

LogId = tuple[int, int]
START: LogId = (0, 0)

_HEAD = struct.Struct("<cI")  # kind, blocks
_SENT, _CORRECTED, _DELIVERED, _SEVERAL = b"s", b"c", b"d", b"m"
_LENGTH = struct.Struct("<I")


class Write(Struct, frozen=True):
    """Set or clear the replica's bit on a run of blocks."""

    op: bytes  # b"+" or b"-"
    run: Run


def sent(chain: PrefixChain, known_blocks: int) -> bytes:
    """Log that a chain was sent, and that its sender has set the bits beyond the first `known_blocks`."""
    return _HEAD.pack(_SENT, known_blocks) + chain


def corrected(chain: PrefixChain, held_blocks: int) -> bytes:
    """Log that a replica turned out to hold only the first `held_blocks` blocks of a chain."""
    return _HEAD.pack(_CORRECTED, held_blocks) + chain


def delivered(chain: PrefixChain, held_blocks: int) -> bytes:
    """Log that a request found the first `held_blocks` blocks of a chain in a cache whose events say what it holds."""
    return _HEAD.pack(_DELIVERED, held_blocks) + chain


def read_delivery(record: bytes) -> tuple[PrefixChain, int] | None:
    """Read what `delivered` wrote; None for another kind of record."""
    kind, blocks = _HEAD.unpack_from(record)
    return (PrefixChain(record[_HEAD.size :]), blocks) if kind == _DELIVERED else None


def together(records: Sequence[bytes]) -> bytes:
    """Make one log entry of several records, in order."""
    if len(records) == 1:
        return records[0]
    return _HEAD.pack(_SEVERAL, len(records)) + b"".join(_LENGTH.pack(len(record)) + record for record in records)


def records_in(entry: bytes) -> Iterator[bytes]:
    """Yield the records of a log entry."""
    if not entry.startswith(_SEVERAL):
        yield entry
        return
    at = _HEAD.size
    while at < len(entry):
        start = at + _LENGTH.size
        at = start + _LENGTH.unpack_from(entry, at)[0]
        yield entry[start:at]


def log_id(text: bytes) -> LogId:
    """Read the id of a log entry, `milliseconds-number`."""
    ms, _, number = text.partition(b"-")
    return int(ms), int(number)


def part_of(chain: bytes, first: int, end: int | None = None) -> Run:
    """Return the blocks of a chain from depth `first` on, up to `end`."""
    start = first - first % GROUP_BLOCKS
    stop = None if end is None else end * HASH_BYTES
    return Run(first - start, chain[start * HASH_BYTES : stop])


class _Cleared:
    """The blocks that a batch clears and has not stored again, as runs by their first block.

    A block is in one run at most. Where blocks are stored again, whatever lies above them is held, so they begin where
    a run begins, and go on from run to run; what they leave of a run is a run of its own.
    """

    def __init__(self) -> None:
        self._runs: dict[bytes, bytes] = {}

    def add(self, blocks: bytes) -> None:
        self._runs[blocks[:HASH_BYTES]] = blocks

    def take(self, stored: bytes) -> bool:
        """Note that blocks are stored again; True where any of them was cleared."""
        at = 0
        while run := self._runs.pop(stored[at : at + HASH_BYTES], None):
            same = common_bytes(run, stored[at:])
            if rest := run[same:]:
                self.add(rest)
            at += same
        return at > 0


class Owner:
    """One replica's log, as far as it was replayed."""

    def __init__(self, capacity_blocks: int, snapshot: bytes | None = None, log_end: bytes = b"0-0") -> None:
        self.residency = Residency(capacity_blocks)
        self.last_id = START
        self.evictions = 0
        self.bytes_since_snapshot = 0
        self.snapshot_at_s = 0.0
        # The log's end when bits were last cleared. A predecessor may have cleared up to the moment of the takeover.
        self._clean_after = log_id(log_end)
        if snapshot is not None:
            head, _, packed = snapshot.partition(b" ")
            residency = Residency.unpack(packed)
            if residency.capacity_blocks == capacity_blocks:
                self.residency, self.last_id = residency, log_id(head)

    def replay(self, entries: Sequence[tuple[bytes, bytes]]) -> list[Write]:
        """Take in log entries (id, record) and return what has to be written, in order."""
        writes: list[Write] = []
        cleared = _Cleared()
        for text, entry in entries:
            self.last_id = log_id(text)
            self.bytes_since_snapshot += len(entry)
            for record in records_in(entry):
                writes += self._replayed(record, cleared)
        return writes

    def _replayed(self, record: bytes, cleared: _Cleared) -> list[Write]:
        kind, blocks = _HEAD.unpack_from(record)
        if kind == _DELIVERED:  # from before the events fell silent
            return []
        chain = PrefixChain(record[_HEAD.size :])
        if kind == _CORRECTED:
            change = self.residency.correct(chain, blocks)
        else:
            change = self.residency.record(chain)
            self.evictions += sum(map(len, change.evicted)) if change.evicted else 0
        writes = []
        for run in change.evicted:
            writes.append(Write(b"-", run))
            cleared.add(run.blocks)
        if change.stored is not None:
            if cleared.take(change.stored.blocks) or self.last_id <= self._clean_after:
                writes.append(Write(b"+", change.stored))
            elif change.held < blocks:
                writes.append(Write(b"+", part_of(chain, change.held, blocks)))
        return writes

    def cleared(self, log_end: bytes) -> None:
        """Note how far the log reached when the writes were executed."""
        self._clean_after = log_id(log_end)

    def snapshot(self) -> tuple[str, bytes]:
        """Return the id of the last record in it, and the packed Residency."""
        return f"{self.last_id[0]}-{self.last_id[1]}", self.residency.pack()
