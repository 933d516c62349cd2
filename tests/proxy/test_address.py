"""How addresses are written."""

from __future__ import annotations

import errno
import os

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
