"""Which headers cross the router, in both directions.

Hop-by-hop headers stay on their side (RFC 9110, 7.6.1), those that `Connection` names included. The client's
credentials end here: what a replica wants to see is its own key. The client cannot choose a data-parallel rank.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from email.utils import formatdate
from functools import lru_cache
from random import Random

RawHeader = tuple[bytes, bytes]

REPLICA = b"x-kvroute-replica"
PREDICTED_TOKENS = b"x-kvroute-predicted-tokens"
COST_S = b"x-kvroute-cost-s"
REQUEST_ID = b"x-request-id"

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
_KEPT_FROM_CLIENTS = _HOP_BY_HOP | frozenset((b"content-length", REQUEST_ID, REPLICA))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@=+-]{1,128}")
_ENDS_HERE, _ENDS_THERE, _NAMES_HOPS = 1, 2, 4  # bits of a name: kept from replicas, from clients, `Connection` itself
_NAMES_MAX = 4096
_identities = Random(os.urandom(32))  # an id has to be unique, not secret
_bits: dict[bytes, int] = {}  # by the name as it was written: peers send the same few names again and again


def to_replica(headers: Iterable[RawHeader], request_id: str) -> list[RawHeader]:
    """Return the client's end-to-end headers, with the request's id."""
    kept = _end_to_end(headers, _ENDS_HERE)
    kept.append((b"X-Request-Id", request_id.encode()))
    kept.append((b"Accept-Encoding", b"identity"))
    return kept


def to_client(headers: Iterable[RawHeader], request_id: str) -> list[RawHeader]:
    """Return the replica's end-to-end headers, with the request's id; without the length, which the exchange tells."""
    kept = _end_to_end(headers, _ENDS_THERE)
    kept.append((REQUEST_ID, request_id.encode()))
    return kept


def ours(request_id: str | None = None, content_type: bytes = b"application/json") -> list[RawHeader]:
    """Return the headers of an answer of the router's own."""
    head = [(b"Content-Type", content_type), (b"Date", _date(int(time.time())))]
    if request_id is not None:
        head.append((REQUEST_ID, request_id.encode()))
    return head


def request_id(given: bytes | None) -> str:
    """Return the client's X-Request-Id where it is sound, else a new one."""
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given.decode()
    return f"{_identities.getrandbits(128):032x}"


def find(headers: Iterable[RawHeader], name: bytes) -> bytes | None:
    """Return the first value of a header, its name given in lower case."""
    return next((value for key, value in headers if key.lower() == name), None)


@lru_cache(maxsize=1)
def _date(second: int) -> bytes:
    return formatdate(second, usegmt=True).encode()


def _end_to_end(headers: Iterable[RawHeader], ends: int) -> list[RawHeader]:
    kept, named, known = [], b"", _bits.get
    for header in headers:
        bits = known(header[0])
        if bits is None:
            bits = _bits_of(header[0])
        if not bits & ends:
            kept.append(header)
        elif bits & _NAMES_HOPS:
            named += header[1].lower() + b","
    if named in (b"", b"keep-alive,", b"close,"):
        return kept
    hops = {token.strip() for token in named.split(b",")}
    return [header for header in kept if header[0].lower() not in hops]


def _bits_of(name: bytes) -> int:
    lower = name.lower()
    bits = _ENDS_HERE * (lower in _KEPT_FROM_REPLICAS) | _ENDS_THERE * (lower in _KEPT_FROM_CLIENTS)
    bits |= _NAMES_HOPS * (lower == b"connection")
    if len(_bits) < _NAMES_MAX:
        _bits[name] = bits
    return bits
