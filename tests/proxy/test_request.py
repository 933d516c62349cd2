"""What the parser leaves open about the head of a request."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import BadRequest
from kvroute.proxy.request import Request, request_of

HOST = (b"Host", b"a:80")


def made(target: bytes = b"/", *headers: tuple[bytes, bytes], method: str = "GET", version: str = "1.1") -> Request:
    return request_of(method, target, version, [HOST, *headers])


def test_sound_request():
    """A request is kept as it came; its path is decoded for routing only."""
    request = made(b"/v1/%63hat?a=%20&b", (b"X-A", b"1"), (b"x-a", b"2"), (b"Content-Length", b"7"))
    assert (request.target, request.path, request.length) == ("/v1/%63hat?a=%20&b", "/v1/chat", 7)
    assert request.headers == [HOST, (b"X-A", b"1"), (b"x-a", b"2"), (b"Content-Length", b"7")]
    assert request.fields[b"x-a"] == b"1"


@pytest.mark.parametrize(
    ("target", "origin"),
    [(b"http://a/b?c", "/b?c"), (b"HTTPS://a:1", "/"), (b"http://a?c", "/?c"), (b"//a/b", "//a/b"), (b"/?", "/?")],
)
def test_absolute_targets(target: bytes, origin: str):
    """A target with scheme and host is read as the path in it (RFC 9112, 3.2.2)."""
    assert made(target).target == origin


@pytest.mark.parametrize("target", [b"*", b"a", b"a:80", b"ftp://a/b", b"/a#b", b"/\xff", b"", b"http:///b"])
def test_other_targets(target: bytes):
    """What is neither a path nor a URL of ours is refused."""
    with pytest.raises(BadRequest, match="target"):
        made(target)


def test_asterisk():
    """The asterisk is a target of OPTIONS alone."""
    assert made(b"*", method="OPTIONS").path == "*"


@pytest.mark.parametrize(
    ("version", "headers", "status"),
    [
        ("1.1", [], 400),
        ("1.1", [HOST, (b"host", b"a:80")], 400),
        ("1.0", [HOST, HOST], 400),
        ("1.1", [(b"Host", b"a b")], 400),
        ("1.1", [(b"Host", b"a/b")], 400),
        ("1.1", [HOST, (b"Transfer-Encoding", b"gzip, chunked")], 501),
        ("1.0", [HOST, (b"Transfer-Encoding", b"chunked")], 400),
        ("1.1", [HOST, (b"Expect", b"200-ok")], 417),
        ("0.9", [HOST], 505),
        ("2.0", [HOST], 505),
    ],
)
def test_unsound_heads(version: str, headers: list[tuple[bytes, bytes]], status: int):
    """A head that servers could read differently, or that asks for what is not done here, is refused."""
    with pytest.raises(BadRequest) as caught:
        request_of("POST", b"/", version, headers)
    assert caught.value.status == status


def test_tunnel():
    """CONNECT is refused."""
    with pytest.raises(BadRequest) as caught:
        made(b"a:80", method="CONNECT")
    assert caught.value.status == 501


def test_http_1_0_needs_no_host_and_expects_nothing():
    """HTTP/1.0 has neither Host nor Expect."""
    request = request_of("GET", b"/", "1.0", [(b"Expect", b"whatever")])
    assert not request.expects_continue
    assert made(b"/", (b"Expect", b"100-Continue")).expects_continue


@given(st.binary(max_size=40), st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=4))
def test_any_bytes(target: bytes, headers: list[tuple[bytes, bytes]]):
    """Whatever the bytes are, they are a request or a BadRequest."""
    with suppress(BadRequest):
        assert made(target, *headers).target.startswith("/")
