"""Logs of several processes in one stream: whole lines, never more at once than a pipe takes as one."""

from __future__ import annotations

import logging
import os
import select
from collections.abc import Iterator


class LineHandler(logging.Handler):
    """Writes records to a file descriptor that other processes write to as well."""

    def __init__(self, fd: int = 2) -> None:
        super().__init__()
        self._fd = fd

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record, which may be several lines."""
        try:
            for piece in pieces(self.format(record).encode(errors="backslashreplace") + b"\n"):
                os.write(self._fd, piece)
        except OSError:
            self.handleError(record)


def pieces(data: bytes, limit: int = select.PIPE_BUF) -> Iterator[bytes]:
    """Yield the lines, as many together as fit; a longer one comes by itself and may be torn apart."""
    start = 0
    while len(data) - start > limit:
        end = data.rfind(b"\n", start, start + limit) + 1 or data.index(b"\n", start) + 1
        yield data[start:end]
        start = end
    if start < len(data):
        yield data[start:]
