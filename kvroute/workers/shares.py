"""What the supervisor lends to all workers, so that each takes its share of connections: counts, and ways to others.

A way is a pair of datagram sockets that outlives the workers: what lies in it when one dies is its successor's.
"""

from __future__ import annotations

import mmap
import socket
import tempfile
from collections.abc import Iterable

from kvroute.proxy.peers import ABSENT, Peers, locked

SLOTS_MAX = 64
_BYTES = SLOTS_MAX * 8


class Shares:
    """Counts of open connections by slot, and an inbox for each slot."""

    def __init__(self) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - workers map it; it has no name to be left behind
        self._file.truncate(_BYTES)
        self._map, self._counts = _mapped(self._file.fileno())
        self._ways: dict[int, tuple[socket.socket, socket.socket]] = {}
        for slot in range(SLOTS_MAX):
            self._counts[slot] = ABSENT

    @property
    def counts(self) -> int:
        """File descriptor of the counts."""
        return self._file.fileno()

    def inbox(self, slot: int) -> int:
        """File descriptor from which a slot's worker takes what others give it."""
        return self._way(slot)[0].fileno()

    def outboxes(self, slots: Iterable[int]) -> dict[int, int]:
        """File descriptors by which slots are given something."""
        return {slot: self._way(slot)[1].fileno() for slot in slots}

    def leave(self, slot: int) -> None:
        """Note that nobody takes connections in a slot."""
        with locked(self.counts):
            self._counts[slot] = ABSENT

    def close(self) -> None:
        """Close all of it; workers keep what they have."""
        for way in self._ways.values():
            for end in way:
                end.close()
        self._counts.release()
        self._map.close()
        self._file.close()

    def _way(self, slot: int) -> tuple[socket.socket, socket.socket]:
        if slot not in self._ways:
            self._ways[slot] = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        return self._ways[slot]


def peers_of(slot: int, counts: int, inbox: int, outboxes: dict[int, int]) -> Peers:
    """Return a worker's view of what it was lent, from file descriptors."""
    ways = {other: socket.socket(fileno=fd) for other, fd in outboxes.items()}
    return Peers(slot, _mapped(counts)[1], counts, socket.socket(fileno=inbox), ways)


def _mapped(fd: int) -> tuple[mmap.mmap, memoryview[int]]:
    mapped = mmap.mmap(fd, _BYTES)
    return mapped, memoryview(mapped).cast("q")
