"""What a supervisor and a worker tell each other: a line of JSON on the worker's input, then lines on its output.

The worker's input stays open for as long as the supervisor lives. The kernel closes it however that one dies.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from kvroute.config import Config

LINE_BYTES_MAX = 8 << 20  # a page of metrics in one line


class Assignment(Struct, frozen=True, kw_only=True):
    """The supervisor's one line. Keys are in it, which is why it is no argument of the command."""

    config: Config
    slot: int
    sockets: tuple[int, ...]  # file descriptors, bound to the public address
    counts: int  # file descriptor of the counts of connections
    inbox: int  # file descriptors of the ways between workers
    outboxes: dict[int, int]  # slot -> file descriptor
    admin: str  # path of the Unix socket on which to answer the supervisor


class Said(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a worker."""

    serves: bool = False  # requests are taken from now on
    stops: bool = False  # none is taken any more
    error: str = ""  # why it does not start
    metrics: str = ""  # its last words: all that it counted


def line(message: Assignment | Said) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"
