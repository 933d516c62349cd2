"""Which headers cross the router, in both directions.

Hop-by-hop headers stay on their side (RFC 9110, 7.6.1), those that `Connection` names included. The client's
credentials end here: what a replica wants to see is its own key. The client cannot choose a data-parallel rank.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable

from multidict import CIMultiDict

RawHeader = tuple[bytes, bytes]

REPLICA = "x-kvroute-replica"
PREDICTED_TOKENS = "x-kvroute-predicted-tokens"
COST_S = "x-kvroute-cost-s"
REQUEST_ID = "x-request-id"

_HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
_KEPT_FROM_REPLICAS = _HOP_BY_HOP | frozenset(
    (
        b"accept-encoding",  # an encoded answer could not be looked into
        b"api-key",
        b"authorization",
        b"content-length",
        b"cookie",
        b"expect",
        b"host",
        b"x-api-key",
        b"x-data-parallel-rank",
        b"x-request-id",
    )
)
_KEPT_FROM_CLIENTS = _HOP_BY_HOP | frozenset((b"x-request-id", REPLICA.encode()))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@=+-]{1,128}")


def to_replica(headers: Iterable[RawHeader], request_id: str) -> list[RawHeader]:
    """Return the client's end-to-end headers, with the request's id."""
    kept = [header for header in headers if header[0].lower() not in _KEPT_FROM_REPLICAS]
    if named := _named_by_connection(headers):
        kept = [header for header in kept if header[0].lower() not in named]
    kept.append((b"X-Request-Id", request_id.encode()))
    kept.append((b"Accept-Encoding", b"identity"))
    return kept


def to_client(headers: Iterable[RawHeader], request_id: str) -> CIMultiDict[str]:
    """Return the replica's end-to-end headers, with the request's id."""
    named = _named_by_connection(headers)
    kept = CIMultiDict(
        (name.decode("latin-1"), value.decode("latin-1"))
        for name, value in headers
        if (lower := name.lower()) not in _KEPT_FROM_CLIENTS and lower not in named
    )
    kept[REQUEST_ID] = request_id
    return kept


def request_id(headers: Iterable[RawHeader]) -> str:
    """Return the client's X-Request-Id where it is sound, else a new one."""
    for name, value in headers:
        if name.lower() == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return secrets.token_hex(16)


def find(headers: Iterable[RawHeader], name: bytes) -> bytes | None:
    """Return the first value of a header, its name given in lower case."""
    return next((value for key, value in headers if key.lower() == name), None)


def _named_by_connection(headers: Iterable[RawHeader]) -> frozenset[bytes]:
    values = [value for name, value in headers if name.lower() == b"connection"]
    if not values or values == [b"keep-alive"] or values == [b"close"]:
        return frozenset()
    return frozenset(token.strip().lower() for value in values for token in value.split(b","))
