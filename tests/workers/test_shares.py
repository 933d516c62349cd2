"""What the supervisor lends, as workers see it through file descriptors."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from kvroute.proxy.peers import Peers
from kvroute.workers.shares import Shares, peers_of


@pytest.fixture
def shares() -> Iterator[Shares]:
    made = Shares()
    yield made
    made.close()


def worker(shares: Shares, slot: int, slots: int) -> Peers:
    """Return what a worker makes of what it was lent; descriptors are copies, as in a process of its own."""
    outboxes = {other: os.dup(fd) for other, fd in shares.outboxes(range(slots)).items() if other != slot}
    return peers_of(slot, shares.counts, os.dup(shares.inbox(slot)), outboxes)


def test_workers_see_each_others_counts(shares):
    """A connection goes from one worker to another that has fewer, through what both were lent."""
    one, other = worker(shares, 0, 2), worker(shares, 1, 2)
    client, accepted = socket.socketpair()
    with client, accepted:
        one.arrive()
        assert not one.place(accepted), "the other one is not there yet"
        other.arrive()
        assert one.place(accepted)
        (taken,) = other.take()
        taken.close()
    one.close()
    other.close()


def test_what_lies_in_an_inbox_is_the_successors(shares):
    """A connection that was given to a worker which then died is taken by the next one in its slot."""
    one, other = worker(shares, 0, 2), worker(shares, 1, 2)
    client, accepted = socket.socketpair()
    with client, accepted:
        one.arrive()
        other.arrive()
        assert [one.place(accepted) for _ in range(2)] == [False, True]
        other.close()
        shares.leave(1)
        successor = worker(shares, 1, 2)
        (taken,) = successor.arrive()
        taken.close()
    one.close()
    successor.close()


def test_nothing_is_given_to_an_empty_slot(shares):
    """A slot whose worker is gone is nobody's heir."""
    one, other = worker(shares, 0, 2), worker(shares, 1, 2)
    client, accepted = socket.socketpair()
    with client, accepted:
        one.arrive()
        other.arrive()
        shares.leave(1)
        assert [one.place(accepted) for _ in range(2)] == [False, False]
    one.close()
    other.close()
