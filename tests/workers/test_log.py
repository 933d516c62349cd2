"""Lines of several processes that write into one pipe."""

from __future__ import annotations

import logging
import os
import subprocess
import sys

import pytest

from kvroute.workers.log import LineHandler, pieces

pytestmark = pytest.mark.slow  # real processes, many of them

WRITER = """
import logging, sys
from kvroute.workers.log import LineHandler
log = logging.getLogger("x")
log.addHandler(LineHandler(1))
log.setLevel(logging.INFO)
line = sys.argv[1] * 200
for _ in range(50):
    log.info("%s", "\\n".join([line] * 300))
"""


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (b"a\n", [b"a\n"]),
        (b"a\nbc\n", [b"a\nbc\n"]),
        (b"ab\ncd\nef\n", [b"ab\n", b"cd\n", b"ef\n"]),
        (b"a\nb\nc\nd\n", [b"a\nb\n", b"c\nd\n"]),
        (b"abcdefgh\ni\n", [b"abcdefgh\n", b"i\n"]),
    ],
)
def test_pieces_are_whole_lines(data, expected):
    """As many lines as fit into the limit, here 5 bytes; one that is longer by itself."""
    assert list(pieces(data, 5)) == expected


def test_lines_of_two_processes_are_not_mixed():
    """Two processes write large records into one pipe that is read slowly; every line is one process's."""
    reader, writer = os.pipe()
    processes = [subprocess.Popen([sys.executable, "-c", WRITER, name], stdout=writer) for name in "ab"]
    os.close(writer)
    with os.fdopen(reader, "rb") as lines:
        found = [line.rstrip(b"\n") for line in lines]
    assert [process.wait(30) for process in processes] == [0, 0]
    assert len(found) == 2 * 50 * 300
    assert set(found) == {b"a" * 200, b"b" * 200}


def test_a_closed_stream_is_not_the_loggers_problem(capsys):
    """Where nobody takes the log any more the process goes on."""
    reader, writer = os.pipe()
    os.close(reader)
    LineHandler(writer).emit(logging.LogRecord("x", logging.INFO, "", 0, "text", None, None))
    os.close(writer)
    assert "BrokenPipeError" in capsys.readouterr().err
