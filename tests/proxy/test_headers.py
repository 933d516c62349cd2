"""Which headers cross the router."""

from __future__ import annotations

import re

import pytest

from kvroute.proxy import headers

HOP_BY_HOP = ["Connection", "Keep-Alive", "TE", "Trailer", "Transfer-Encoding", "Upgrade", "Proxy-Authorization"]
CREDENTIALS = ["Authorization", "Cookie", "X-Api-Key", "api-key"]
OURS = ["Host", "Content-Length", "Expect", "X-Data-Parallel-Rank", "X-Request-Id", "Accept-Encoding"]


@pytest.mark.parametrize("name", HOP_BY_HOP + CREDENTIALS + OURS)
def test_kept_from_replicas(name: str):
    """Hop-by-hop headers, credentials, and what the router says itself stay on the client's side."""
    sent = headers.to_replica([(name.encode(), b"x-value"), (b"X-Custom", b"y")], "id-1")
    assert sent == [(b"X-Custom", b"y"), (b"X-Request-Id", b"id-1"), (b"Accept-Encoding", b"identity")]


def test_named_by_connection():
    """Headers that Connection names belong to one hop, in both directions."""
    given = [(b"Connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"X-End", b"2")]
    assert next(name for name, _ in headers.to_replica(given, "i")) == b"X-End"
    assert headers.to_client(given, "i") == [(b"X-End", b"2"), (b"x-request-id", b"i")]


def test_names_and_order_are_kept():
    """End-to-end headers cross as they were written, repeated ones too."""
    given = [(b"X-B", b"1"), (b"x-a", b"2"), (b"X-B", b"3")]
    assert headers.to_replica(given, "i")[:3] == given
    assert headers.to_client(given, "i")[:3] == given


def test_kept_from_clients():
    """A replica behind another router does not set our headers, and its own id does not replace the request's."""
    theirs = {
        b"X-Request-Id": b"x",
        b"x-kvroute-replica": b"x",
        b"Transfer-Encoding": b"chunked",
        b"Content-Length": b"1",
    }
    given = list(theirs.items())
    assert headers.to_client(given, "ours") == [(b"x-request-id", b"ours")]


@pytest.mark.parametrize("value", [b"a", b"req_1.2-3:4", b"x" * 128])
def test_sound_ids_are_kept(value: bytes):
    """A client's request id is kept where it is sound."""
    assert headers.request_id(value) == value.decode()


@pytest.mark.parametrize("value", [b"", b"x" * 129, b"a b", b'a"b', b"\xff", b"a\tb", b"a\n"])
def test_odd_ids_are_replaced(value: bytes):
    """An id that could break a log line or a header is replaced."""
    assert re.fullmatch("[0-9a-f]{32}", headers.request_id(value))


def test_ids_are_made():
    """Every request has an id of its own."""
    assert headers.request_id(None) != headers.request_id(None)


def test_find():
    """A header is found whatever its case; an absent one is None."""
    assert headers.find([(b"A-b", b"1"), (b"a-B", b"2")], b"a-b") == b"1"
    assert headers.find([], b"a-b") is None
