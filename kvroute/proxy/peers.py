"""What processes on one port know of each other: who has how many connections, and how to hand one over.

The kernel spreads connections over processes by a hash. That is even for thousands, and far from it for a few that live
long, such as those of a proxy or of a benchmark. So whoever is given a connection and has more than another one passes
it on. The counts lie in memory that all of them map. Each process writes its own, and adds to another's what it
has just given away; where two of them write one at once it is wrong until its owner's next connection.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

ABSENT = 1 << 40  # the count of a slot in which nobody takes connections: more than anybody could have


class Peers:
    """One process and the others.

    Args:
        slot: which of them this one is.
        counts: open connections of each slot, shared memory of 8-byte integers.
        inbox: a datagram socket on which connections come from others.
        outboxes: the way to the other slots' inboxes.
    """

    def __init__(
        self, slot: int, counts: memoryview[int], inbox: socket.socket, outboxes: Mapping[int, socket.socket]
    ) -> None:
        self.inbox = inbox
        self._slot = slot
        self._counts = counts
        self._outboxes = outboxes
        for each in (inbox, *self._outboxes.values()):
            each.setblocking(False)

    def note(self, connections: int) -> None:
        """Let the others know how many connections are open here."""
        self._counts[self._slot] = connections

    def give_away(self, connection: socket.socket) -> bool:
        """Hand a connection to whoever has fewer; return whether it is theirs now."""
        heir = fewest(self._counts, self._slot, self._outboxes)
        if heir is None:
            return False
        with contextlib.suppress(OSError):  # its inbox is full
            socket.send_fds(self._outboxes[heir], [b"c"], [connection.fileno()])
            self._counts[heir] += 1  # until it says so itself
            return True
        return False

    def take(self) -> list[socket.socket]:
        """Return the connections that others gave away since the last time."""
        taken: list[socket.socket] = []
        with contextlib.suppress(BlockingIOError):
            while len(taken) < 64:
                _, fds, _, _ = socket.recv_fds(self.inbox, 1, 1)
                taken += [socket.socket(fileno=fd) for fd in fds]
        return taken

    def close(self) -> None:
        """Be nobody's heir any more, and close the ways to the others."""
        self._counts[self._slot] = ABSENT
        for each in (self.inbox, *self._outboxes.values()):
            each.close()


def fewest(counts: memoryview[int], own: int, others: Mapping[int, object]) -> int | None:
    """Return who has fewest connections, None where that is nobody else."""
    heir = min(others, key=counts.__getitem__, default=own)
    return heir if counts[heir] < counts[own] else None
