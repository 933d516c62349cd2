"""Files of traces, played in any order without holding them in memory: lines are spooled into a temporary database.

Traces come plain or gzipped, one JSON object a line. A line's session, family and time are read once; the rest of it is
looked at only when it is its turn. What a line means is not known here.
"""

from __future__ import annotations

import gzip
import sqlite3
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import IO

import msgspec
from msgspec import Struct
from xxhash import xxh3_64_intdigest

from kvroute.errors import ConfigError, excerpt

LINE_BYTES_MAX = 64 << 20
BATCH_LINES = 1000
SQL = """
CREATE TABLE lines (
  number INTEGER PRIMARY KEY, session TEXT, family TEXT, at REAL, tokens INTEGER, line BLOB
);
"""
INDEXES = """
CREATE INDEX by_session ON lines (session, at, number);
CREATE INDEX by_family ON lines (family, session, tokens);
CREATE INDEX by_time ON lines (at, number);
"""


class Glance(Struct):
    """What is read of every line at once."""

    session_id: str | int | None = None
    timestamp: float | None = None
    offset_ms: float | None = None
    input_length: int = 0


class Steps(Struct, frozen=True):
    """How coarse a trace's timestamps are."""

    width_s: float  # between two of them
    requests: float  # that share one

    @property
    def is_coarse(self) -> bool:
        """Whether requests were stamped together that did not arrive together."""
        return self.requests > 1.5 and self.width_s >= 0.1


def lines_of(path: Path) -> Iterator[bytes]:
    """Yield the lines of a file, unpacked where its name ends in .gz; empty ones are left out.

    Raises:
        ConfigError: it cannot be read, or a line is too long.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from _bounded(file, path)
    except (OSError, EOFError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def _bounded(file: IO[bytes] | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    if file.peek(len(BOM_UTF8)).startswith(BOM_UTF8):  # type: ignore[union-attr]
        file.read(len(BOM_UTF8))  # as Windows' editors and shells write it
    while line := file.readline(LINE_BYTES_MAX + 1):
        if len(line) > LINE_BYTES_MAX:
            raise ConfigError(f"{path}: a line is longer than {LINE_BYTES_MAX >> 20} MiB")
        if stripped := line.strip():
            yield stripped


class Spool:
    """The lines of one trace. Close it when it was played for the last time."""

    def __init__(self, lines: Iterable[bytes], *, longest_tokens: int | None = None) -> None:
        """Take lines in.

        Args:
            lines: JSON objects.
            longest_tokens: sessions with a longer prompt are left out.

        Raises:
            ConfigError: a line is no JSON object, or its session or time is none.
        """
        self._file = tempfile.NamedTemporaryFile(prefix="kvroute-trace-")  # noqa: SIM115 - closed with the spool
        self._db = sqlite3.connect(self._file.name)
        self._db.create_function("shuffled", 2, _shuffled, deterministic=True)
        self._db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -65536;" + SQL)
        try:
            self._fill(lines)
        except BaseException:
            self.close()
            raise
        self._db.executescript(INDEXES)
        if longest_tokens is not None:
            self._db.execute(
                "DELETE FROM lines WHERE family IN (SELECT family FROM lines GROUP BY family HAVING max(tokens) > ?)",
                (longest_tokens,),
            )

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the temporary file back."""
        self._db.close()
        self._file.close()

    def __len__(self) -> int:
        return self._one("SELECT count(*) FROM lines")

    def head(self, count: int) -> list[bytes]:
        """Return the first lines."""
        return [line for (line,) in self._db.execute("SELECT line FROM lines ORDER BY number LIMIT ?", (count,))]

    def steps(self) -> Steps:
        """Return how coarse the timestamps are."""
        count, distinct = self._db.execute("SELECT count(at), count(DISTINCT at) FROM lines").fetchone()
        if distinct < 2:
            return Steps(0.0, 1.0)
        width_ms = self._db.execute(
            "SELECT gap FROM (SELECT at - lag(at) OVER (ORDER BY at) AS gap FROM (SELECT DISTINCT at FROM lines)) "
            "WHERE gap > 0 ORDER BY gap LIMIT 1 OFFSET ?",
            ((distinct - 1) // 2,),
        ).fetchone()[0]
        return Steps(width_ms / 1000, count / distinct)

    def by_time(self) -> Iterator[tuple[bytes, bytes | None]]:
        """Yield every line, and the next of its session."""
        later = "SELECT line FROM lines WHERE session = ? AND (at, number) > (?, ?) ORDER BY at, number LIMIT 1"
        for number, session, at, line in self._db.execute(
            "SELECT number, session, at, line FROM lines ORDER BY at, number"
        ):
            found = self._db.execute(later, (session, at, number)).fetchone() if at is not None else None
            yield line, found[0] if found else None

    def in_order(self) -> Iterator[bytes]:
        """Yield the lines as they were taken in."""
        return (line for (line,) in self._db.execute("SELECT line FROM lines ORDER BY number"))

    def families(self, seed: int | None) -> Iterator[str]:
        """Yield the names of families (sessions with their sub-sessions) by time, or shuffled if there is a seed."""
        order = "min(at), min(number)" if seed is None else "shuffled(family, ?)"
        query = f"SELECT family FROM lines GROUP BY family ORDER BY {order}"
        return (name for (name,) in self._db.execute(query, () if seed is None else (seed,)))

    def sessions(self, family: str) -> Sequence[str]:
        """Return a family's sessions."""
        rows = self._db.execute("SELECT DISTINCT session FROM lines WHERE family = ? ORDER BY session", (family,))
        return [session for (session,) in rows]

    def lines(self, session: str) -> Iterator[bytes]:
        """Yield a session's lines."""
        rows = self._db.execute("SELECT line FROM lines WHERE session = ? ORDER BY at, number", (session,))
        return (line for (line,) in rows)

    def _one(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _fill(self, lines: Iterable[bytes]) -> None:
        decode = msgspec.json.Decoder(Glance).decode
        numbered = enumerate(lines)
        while batch := list(islice(numbered, BATCH_LINES)):
            rows = []
            for number, line in batch:
                try:
                    glance = decode(line)
                except msgspec.DecodeError as error:
                    where = f"line {number + 1}, empty ones not counted"
                    raise ConfigError(f"{where}: {error}: {excerpt(line)}") from None
                session = f"#{number}" if glance.session_id is None else str(glance.session_id)
                at = glance.timestamp if glance.timestamp is not None else glance.offset_ms
                family = session if glance.offset_ms is None else session.partition(".")[0]
                rows.append((number, session, family, at, glance.input_length, line))
            self._db.executemany("INSERT INTO lines VALUES (?, ?, ?, ?, ?, ?)", rows)


def _shuffled(name: str, seed: int) -> int:
    return xxh3_64_intdigest(name.encode(), seed) >> 1
