"""Addresses that several processes listen on."""

from __future__ import annotations

import socket

import pytest

from kvroute.workers.sockets import bind, claim


def test_several_sockets_share_a_port():
    """Connections to one port arrive at both sockets, and none is lost."""
    addresses = claim("127.0.0.1", 0)
    (one,), (two,) = bind(addresses), bind(addresses)
    assert one.getsockname() == two.getsockname() == addresses[0][1]
    for each in (one, two):
        each.listen(64)
        each.settimeout(0)
    clients = [socket.create_connection(addresses[0][1]) for _ in range(64)]
    shares = [accepted(one), accepted(two)]
    assert sum(shares) == 64
    assert all(shares)
    for each in (one, two, *clients):
        each.close()


def accepted(listening: socket.socket) -> int:
    count = 0
    while True:
        try:
            listening.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1


def test_an_address_of_somebody_else_is_not_shared():
    """A port on which another program listens is taken, even if that one would share it."""
    addresses = claim("127.0.0.1", 0)
    (other,) = bind(addresses)
    other.listen()
    with pytest.raises(OSError, match="in use"):
        claim("127.0.0.1", addresses[0][1][1])
    other.close()
    assert claim("127.0.0.1", addresses[0][1][1]) == addresses


def test_no_host_means_every_address_of_one_port():
    """All families get the same port."""
    addresses = claim("", 0)
    assert {address[1] for _, address in addresses} == {addresses[0][1][1]}
    assert "0.0.0.0" in {address[0] for _, address in addresses}
