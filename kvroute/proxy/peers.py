"""What processes on one port know of each other: who has how many connections, and how to hand one over.

The kernel spreads connections over processes by a hash. That is even for thousands, and far from it for a few that live
long, such as those of a proxy or of a benchmark. So whoever is given a connection and has more than another one passes
it on. The counts lie in a file that all of them map; whoever changes one holds the file's lock, for microseconds. The
kernel takes the lock from a process that dies.
"""

from __future__ import annotations

import contextlib
import fcntl
import socket
from collections.abc import Iterator, Mapping

ABSENT = 1 << 40  # the count of a slot in which nobody takes connections: more than anybody could have
TAKEN_MAX = 64  # connections at once


class Peers:
    """One process and the others.

    Args:
        slot: which of them this one is. Of two processes in one slot, while one succeeds the other, both count there.
        counts: connections of each slot, those that were given to it and not taken yet included; 8-byte integers.
        lock: file descriptor of the file that is locked.
        inbox: a datagram socket on which connections come from others.
        outboxes: the way to the other slots' inboxes.
    """

    def __init__(
        self,
        slot: int,
        counts: memoryview[int],
        lock: int,
        inbox: socket.socket,
        outboxes: Mapping[int, socket.socket],
    ) -> None:
        self.inbox = inbox
        self._slot = slot
        self._counts = counts
        self._lock = lock
        self._outboxes = outboxes
        for each in (inbox, *outboxes.values()):
            each.setblocking(False)

    def arrive(self) -> list[socket.socket]:
        """Be there from now on; return what a predecessor was given and did not take."""
        with locked(self._lock):
            left = self.take()
            if self._counts[self._slot] >= ABSENT:
                self._counts[self._slot] = len(left)
        return left

    def place(self, connection: socket.socket) -> bool:
        """Count a new connection here, or hand it to whoever has fewer; return whether it is theirs now."""
        with locked(self._lock):
            heir = fewest(self._counts, self._slot, self._outboxes)
            if heir is not None:
                with contextlib.suppress(OSError):  # its inbox is full
                    socket.send_fds(self._outboxes[heir], [b"c"], [connection.fileno()])
                    self._counts[heir] += 1
                    return True
            self._counts[self._slot] += 1
        return False

    def take(self) -> list[socket.socket]:
        """Return the connections that others gave away since the last time; they are counted already."""
        taken: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while len(taken) < TAKEN_MAX:
                _, fds, _, _ = socket.recv_fds(self.inbox, 1, 1)
                taken += [socket.socket(fileno=fd) for fd in fds]
        return taken

    def gone(self, connections: int = 1) -> None:
        """Count connections no more. Who is absent stays so: his inbox is read by nobody."""
        with locked(self._lock):
            if self._counts[self._slot] < ABSENT:
                self._counts[self._slot] = max(0, self._counts[self._slot] - connections)

    def close(self) -> None:
        """Close the ways to the others."""
        for each in (self.inbox, *self._outboxes.values()):
            each.close()


@contextlib.contextmanager
def locked(file: int) -> Iterator[None]:
    """Hold the lock of a file among processes."""
    fcntl.lockf(file, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.lockf(file, fcntl.LOCK_UN)


def fewest(counts: memoryview[int], own: int, others: Mapping[int, object]) -> int | None:
    """Return who has fewest connections, None where that is nobody else."""
    heir = min(others, key=counts.__getitem__, default=own)
    return heir if counts[heir] < min(counts[own], ABSENT) else None
