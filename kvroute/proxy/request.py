"""The head of a client's request: what the parser found, checked for what it leaves open.

llhttp, under httptools, refuses what would let two readers of one request disagree: bare CR or LF, folded lines, bad
names, a length beside chunks, two lengths. Left to this file are the version, `Host`, other codings than chunked,
expectations, and the forms of a target (RFC 9112, 3.2, 6.1, and RFC 9110, 10.1.1).
"""

from __future__ import annotations

import re
from urllib.parse import unquote

from msgspec import Struct

from kvroute.errors import BadRequest
from kvroute.proxy.headers import RawHeader

_HOST = re.compile(rb"[A-Za-z0-9\-._~%!$&'()*+,;=:\[\]]*")
_ABSOLUTE = re.compile(r"https?://[^/?]+", re.IGNORECASE)


class Request(Struct, frozen=True, kw_only=True):
    """One request without its body."""

    method: str = ""
    target: str = ""  # path and query as they came
    path: str = ""  # decoded, to compare with routes
    version: str = "1.1"
    headers: list[RawHeader] = []  # as received
    fields: dict[bytes, bytes] = {}  # the first value of each, by the name in lower case

    @property
    def length(self) -> int | None:
        """Size of the body in bytes where the client told it."""
        value = self.fields.get(b"content-length")
        return None if value is None else int(value)

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for a word before it sends the body. HTTP/1.0 knows no such word."""
        return b"expect" in self.fields and self.version == "1.1"


def request_of(method: str, target: bytes, version: str, headers: list[RawHeader]) -> Request:
    """Return a request whose head is sound.

    Raises:
        BadRequest: it is not; nothing that follows on this connection can be trusted.
    """
    if version not in ("1.1", "1.0"):
        raise BadRequest("This router speaks HTTP/1.1", status=505, kind="HTTPVersionNotSupportedError")
    if method == "CONNECT":
        raise BadRequest("This router is no tunnel", status=501, kind="NotImplementedError")
    fields: dict[bytes, bytes] = {}
    for header in headers:
        name = header[0].lower()
        if name not in fields:
            fields[name] = header[1]
        elif name == b"host":
            raise BadRequest("The request has more than one Host header")
    _check(fields, version)
    text = _origin_form(method, target)
    path = text.partition("?")[0]
    return Request(
        method=method,
        target=text,
        path=unquote(path) if "%" in path else path,
        version=version,
        headers=headers,
        fields=fields,
    )


def _check(fields: dict[bytes, bytes], version: str) -> None:
    host = fields.get(b"host")
    if host is None:
        if version == "1.1":
            raise BadRequest("The request has no Host header")
    elif not _HOST.fullmatch(host):
        raise BadRequest("The Host header is not a host")
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        if version == "1.0":
            raise BadRequest("HTTP/1.0 has no Transfer-Encoding")
        if coding.lower() != b"chunked":
            raise BadRequest("The only Transfer-Encoding here is chunked", status=501, kind="NotImplementedError")
    expected = fields.get(b"expect")
    if expected is not None and version == "1.1" and expected.lower() != b"100-continue":
        raise BadRequest("The only expectation met here is 100-continue", status=417, kind="ExpectationFailedError")


def _origin_form(method: str, target: bytes) -> str:
    if not target.isascii() or b"#" in target:
        raise BadRequest("The request's target is not a path with a query")
    text = target.decode()
    if text.startswith("/") or (text == "*" and method == "OPTIONS"):
        return text
    absolute = _ABSOLUTE.match(text)
    if absolute is None:
        raise BadRequest("The request's target is not a path with a query")
    rest = text[absolute.end() :]
    return rest if rest.startswith("/") else f"/{rest}"
