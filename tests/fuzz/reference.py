"""What h11 reads of a client's bytes: the reference for the public listener."""

from __future__ import annotations

import re

import h11

Read = tuple[str, str, str, list[tuple[bytes, bytes]], bytes]  # method, target, version, headers, body


def relaxed(data: bytes) -> bytes:
    """Take away what llhttp passes over and h11 does not; none of it leaves a doubt about where the request ends.

    These are empty lines before a request, and more spaces and names of similar protocols in its first line.
    """
    return re.sub(rb"\A([!-~]+) +([!-~]+) +(HTTP|RTSP|ICE)/", rb"\1 \2 HTTP/", data.lstrip(b"\r\n"))


def reference(data: bytes) -> list[Read]:
    """Return the requests that h11 reads whole before it refuses, closes, or the bytes end."""
    found: list[Read] = []
    try:
        while data := relaxed(data):
            server, body = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 17), b""
            server.receive_data(data)
            request = None
            while not isinstance(event := server.next_event(), h11.EndOfMessage):
                if isinstance(event, h11.Request):
                    request = event
                elif isinstance(event, h11.Data):
                    body += bytes(event.data)
                else:  # it wants more
                    return found
            assert request is not None
            target = re.sub(r"^https?://[^/?]+/?", "/", request.target.decode(), flags=re.IGNORECASE)
            version = request.http_version.decode()
            found.append((request.method.decode(), target, version, list(request.headers), body))
            if server.their_state is h11.MUST_CLOSE:
                return found
            data = server.trailing_data[0]
    except h11.RemoteProtocolError:
        pass
    return found


def normal(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Write headers as h11 does: names in lower case, and the values in which case means nothing."""
    lower = [(name.lower(), value) for name, value in headers]
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in lower]
