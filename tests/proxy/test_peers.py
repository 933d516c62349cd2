"""Who gives a connection to whom, over real sockets."""

from __future__ import annotations

import array
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from kvroute.proxy.peers import ABSENT, Peers, fewest


@pytest.mark.parametrize(
    ("counts", "heir"),
    [
        ([0, 0, 0], None),  # nobody has fewer
        ([1, 1, 0], 2),
        ([3, 1, 2], 1),
        ([1, 5, 9], None),
        ([1, ABSENT, 1], None),
        ([1, ABSENT, 0], 2),
    ],
)
def test_whoever_has_fewest_is_the_heir(counts, heir):
    """The one with fewest connections, where it has fewer than this process; nobody who is absent."""
    assert fewest(memoryview(array.array("q", counts)), 0, {1: None, 2: None}) == heir


def test_one_process_alone_has_no_heir():
    """Without others everything is kept."""
    assert fewest(memoryview(array.array("q", [7])), 0, {}) is None


@contextmanager
def two() -> Iterator[tuple[memoryview, Peers, Peers]]:
    """Yield the counts of two processes, and both of them."""
    counts = memoryview(array.array("q", [ABSENT, ABSENT]))
    inboxes, outboxes = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)), strict=True)
    one = Peers(0, counts, inboxes[0], {1: outboxes[1]})
    other = Peers(1, counts, inboxes[1], {0: outboxes[0]})
    try:
        yield counts, one, other
    finally:
        one.close()
        other.close()


def test_a_connection_is_handed_over():
    """What one gives away the other can speak on, and it counts there from then on."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client:
        one.note(2)
        other.note(1)
        assert one.give_away(accepted)
        accepted.close()
        assert list(counts) == [2, 2]
        (taken,) = other.take()
        taken.sendall(b"hello")
        assert client.recv(5) == b"hello"
        taken.close()
        assert other.take() == []


def test_a_full_inbox_is_no_reason_to_wait():
    """Where the other one takes nothing a connection is kept."""
    client, accepted = socket.socketpair()
    with two() as (_, one, other), client, accepted:
        given = 0
        while True:
            one.note(1000)
            other.note(0)
            if not one.give_away(accepted):
                break
            given += 1
            assert given < 100_000
        assert given
        for taken in other.take():
            taken.close()


def test_who_closes_is_given_nothing():
    """A process that takes no connections any more is absent."""
    with two() as (counts, one, other):
        one.note(5)
        other.note(1)
        other.close()
        assert counts[1] == ABSENT
