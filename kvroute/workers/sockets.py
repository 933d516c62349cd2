"""Sockets on one address for several processes: each has one of its own, and the kernel spreads the connections.

The supervisor keeps every socket open for as long as there is a worker for it to be, so that connections which came
while a worker was being replaced wait in it instead of being refused.
"""

from __future__ import annotations

import contextlib
import socket

BACKLOG = 2048
Address = tuple[socket.AddressFamily, tuple[str, int]]


def claim(host: str, port: int) -> list[Address]:
    """Return the addresses that a listener on this host and port binds; port 0 is turned into a free one.

    With SO_REUSEPORT a second program of the same user could bind them, too, and take half of the connections, unseen.
    So they are bound once without it.

    Raises:
        OSError: one of them is taken, or there is none.
    """
    addresses = []
    with contextlib.ExitStack() as stack:
        for family, address in _resolve(host, port):
            probe = stack.enter_context(_socket(family))
            probe.bind((address[0], port))
            port = probe.getsockname()[1]
            addresses.append((family, (address[0], port)))
    return addresses


def bind(addresses: list[Address]) -> list[socket.socket]:
    """Return new sockets on addresses that `claim` returned, bound but not listening.

    Raises:
        OSError: an address is taken.
    """
    sockets = []
    try:
        for family, address in addresses:
            sockets.append(_socket(family))
            sockets[-1].setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            sockets[-1].bind(address)
    except OSError:
        for each in sockets:
            each.close()
        raise
    return sockets


def _resolve(host: str, port: int) -> list[Address]:
    found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    known = {}
    for family, _, _, _, address in found:
        with contextlib.suppress(OSError):  # IPv6 is compiled in, and switched off
            _socket(family).close()
            known[family, str(address[0])] = (family, (str(address[0]), port))
    return list(known.values())


def _socket(family: socket.AddressFamily) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if family == socket.AF_INET6:
        made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return made
