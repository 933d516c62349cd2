"""Who gives a connection to whom, over real sockets."""

from __future__ import annotations

import array
import socket
import subprocess
import sys
import tempfile
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
        ([ABSENT + 3, ABSENT, ABSENT + 1], None),  # all are about to go
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
    """Yield the counts of two processes, and both of them, not there yet."""
    counts = memoryview(array.array("q", [ABSENT, ABSENT]))
    inboxes, outboxes = zip(*(socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)), strict=True)
    with tempfile.TemporaryFile() as lock:
        one = Peers(0, counts, lock.fileno(), inboxes[0], {1: outboxes[1]})
        other = Peers(1, counts, lock.fileno(), inboxes[1], {0: outboxes[0]})
        try:
            yield counts, one, other
        finally:
            one.close()
            other.close()


def test_a_connection_is_handed_over():
    """What one gives away the other can speak on, and it counts there from then on."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client:
        one.arrive()
        other.arrive()
        counts[0] = 1
        assert one.place(accepted)
        accepted.close()
        assert list(counts) == [1, 1]
        (taken,) = other.take()
        taken.sendall(b"hello")
        assert client.recv(5) == b"hello"
        taken.close()
        other.gone()
        assert (other.take(), list(counts)) == ([], [1, 0])


def test_who_was_struck_off_stays_absent():
    """A process that ends has its slot struck off and counts its connections down afterwards: nobody gives it more."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client, accepted:
        one.arrive()
        other.arrive()
        other.place(accepted)
        counts[:] = memoryview(array.array("q", [ABSENT, ABSENT]))
        other.gone(1)
        assert not one.place(accepted)
        assert other.take() == []


def test_connections_alternate():
    """Of many that arrive at one process, each gets half."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client, accepted:
        one.arrive()
        other.arrive()
        given = [one.place(accepted) for _ in range(10)]
        assert (given, list(counts)) == ([False, True] * 5, [5, 5])
        for taken in other.take():
            taken.close()


def test_a_full_inbox_is_no_reason_to_wait():
    """Where the other one takes nothing a connection is kept."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client, accepted:
        one.arrive()
        other.arrive()
        counts[0] = ABSENT - 1
        given = 0
        while one.place(accepted):
            given += 1
            assert given < 100_000
        assert given
        for taken in other.take():
            taken.close()


def test_nobody_gives_to_who_is_not_there():
    """Before a process has arrived everything is kept."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, _), client, accepted:
        one.arrive()
        assert [one.place(accepted) for _ in range(3)] == [False] * 3
        assert list(counts) == [3, ABSENT]


def test_a_successor_counts_what_was_left():
    """What lies in an inbox when a process arrives is its own, and counted."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, other), client, accepted:
        one.arrive()
        other.arrive()
        one.place(accepted)
        assert one.place(accepted)
        counts[1] = ABSENT
        (taken,) = other.arrive()
        taken.close()
        assert counts[1] == 1


def test_two_in_one_slot_count_together():
    """While a process succeeds another one in its slot, neither loses the other's count."""
    client, accepted = socket.socketpair()
    with two() as (counts, one, _), client, accepted:
        one.arrive()
        one.place(accepted)
        one.arrive()
        assert counts[0] == 1


LOCKER = """
import sys, mmap
from kvroute.proxy.peers import locked
with open(sys.argv[1], "r+b") as file:
    counts = memoryview(mmap.mmap(file.fileno(), 8)).cast("q")
    for _ in range(20_000):
        with locked(file.fileno()):
            counts[0] += 1
"""


def test_the_lock_holds_among_processes(tmp_path):
    """Additions of several processes to one count are all there at the end."""
    path = tmp_path / "counts"
    path.write_bytes(bytes(8))
    processes = [subprocess.Popen([sys.executable, "-c", LOCKER, str(path)]) for _ in range(3)]
    assert [process.wait(60) for process in processes] == [0, 0, 0]
    assert int.from_bytes(path.read_bytes(), sys.byteorder) == 60_000
