"""How addresses are written."""

from __future__ import annotations

import asyncio
import errno
import os
import socket

import pytest

from kvroute.proxy.address import cannot_listen, url_of


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("10.0.0.1", "http://10.0.0.1:80"),
        ("0.0.0.0", "http://127.0.0.1:80"),
        ("", "http://127.0.0.1:80"),
        ("::", "http://127.0.0.1:80"),
        ("::1", "http://[::1]:80"),
    ],
)
def test_url(host, url):
    """A listener on every address is reached on loopback; IPv6 addresses stand in brackets."""
    assert url_of(host, 80) == url
    assert url_of(host, 80, is_tls=True) == url.replace("http:", "https:")


def test_an_address_that_cannot_be_had_is_named_with_the_remedy():
    """The section, the address and the reason are in one line."""
    error = OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
    text = str(cannot_listen(error, "127.0.0.1", 80, "admin"))
    assert text.startswith("`admin`: cannot listen on 127.0.0.1:80: Address already in use; set another admin.port")


async def test_the_reason_is_the_systems_own():
    """What asyncio says of a port in use names the address again; a host that is not found has its own words."""
    loop = asyncio.get_running_loop()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match="in use") as caught:
            await loop.create_server(asyncio.Protocol, "127.0.0.1", port)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; " in str(
        cannot_listen(caught.value, "127.0.0.1", port, "admin")
    )
    unknown = socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    assert "nowhere:1: Name or service not known; set listen.host " in str(
        cannot_listen(unknown, "nowhere", 1, "listen")
    )
    elsewhere = OSError(errno.EADDRNOTAVAIL, "asyncio's own words")
    assert "10.9.9.9:1: Cannot assign requested address; set admin.host to" in str(
        cannot_listen(elsewhere, "10.9.9.9", 1, "admin")
    )
