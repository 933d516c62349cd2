"""HTTP/1.1 messages with something wrong in them, made from a seed: each part is sound mostly, and odd now and then.

What is odd comes from the ways in which two readers of one message have disagreed before: lengths beside chunks, line
ends of one byte, spaces before colons, folded lines, sizes in other notations, what an old version means. On top of
that some bytes are changed blindly.
"""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

CRLF = b"\r\n"
LINE_ENDS = [b"\n", b"\r", b"\r\r\n", b"\r\n\n", b"\n\r", b"\r\n\r\n", b" \r\n", b"\t\r\n", b"\0\r\n", b"\x0b\r\n"]
LENGTHS = [
    b"+5",
    b"-1",
    b"0x5",
    b"5, 5",
    b"5,6",
    b"5 5",
    b"",
    b"9" * 25,
    b"05",
    b"5\t",
    b"5;q",
    b"5\x0b",
    b"5\xa0",
    b"1e1",
]
LENGTHS += [b"\xb2", b"_5", b"5_0", b"5.0", b"18446744073709551621", b"4294967301"]
CODINGS = [b"Chunked", b"chunked, chunked", b"gzip, chunked", b"identity", b"chunked;q=1", b"xchunked", b"chunked "]
CODINGS += [
    b"\x0bchunked",
    b"",
    b"chunked,",
    b",chunked",
    b"chunked\0",
    b"chunked, identity",
    b"chunke",
    b"chunkedd",
    b"'chunked'",
]
NAMES = [b"%b ", b"%b\t", b" %b", b"\t%b", b"%b\0", b"%b\r", b"%b\n", b"\xef\xbb\xbf%b", b"%b\x0b", b"(%b)", b"%b;"]
ODD_LINES = [
    b"no colon",
    b": no name",
    b"X-A: b\r\n folded",
    b"X-A:\r\n\tfolded",
    b"Transfer-Encoding:\r\n chunked",
    b"Content-Length: 1\r\n 0",
    b"X-A: a\rb",
    b"X-A: a\nb",
    b"X-A: a\rTransfer-Encoding: chunked",
    b"X-A: a\nContent-Length: 3",
    b"X-A: \0",
    b"X-A: \x01\x7f",
    b"X-A: \xe9\xff",
    b"X-A:",
    b"X-A:b",
    b"X-A: \t b \t ",
    b"X-\xe9: b",
    b"X A: b",
    b"TE: trailers",
    b"Trailer: Content-Length",
    b"Keep-Alive: timeout=5",
    b"X-Long: " + b"l" * 9000,
    b"X-Longer: " + b"l" * 70_000,
    b"\r\n".join(b"X-%d: %b" % (i, b"v" * 60) for i in range(300)),
]
CONNECTIONS = [
    b"close",
    b"keep-alive",
    b"Close",
    b"close, keep-alive",
    b"keep-alive, close",
    b"upgrade",
    b"",
    b"host",
    b"closed",
]
SIZES = [
    b"%x ",
    b" %x",
    b"%x\t",
    b"00%x",
    b"%x;a=b",
    b"%x;a",
    b"%x ;a=b",
    b'%x;a="b\r\n"',
    b"-%x",
    b"+%x",
    b"0x%x",
    b"%xg",
    b"%x\0",
]
SIZES += [b"", b"F" * 17, b"1%016x", b"%x;\n", b"%x;\rX", b"%x\x0b", b"%x,", b"%x;" + b"e" * 5000]
PIECES = [
    b"\r",
    b"\n",
    b"\r\n",
    b" ",
    b"\t",
    b"\0",
    b":",
    b";",
    b",",
    b"0",
    b"f",
    b"-",
    b"+",
    b"\x7f",
    b"\xff",
    b"%",
    b"#",
]
PIECES += [
    b"Content-Length: 3\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b" folded\r\n",
    b"chunked",
    b"\r\n\r\n",
    b"0\r\n\r\n",
]
PIECES += [b"HTTP/1.0", b"HTTP/2.0", b"GET / HTTP/1.1\r\nHost: a\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n"]

METHODS = [
    b"GET",
    b"HEAD",
    b"OPTIONS",
    b"PUT",
    b"DELETE",
    b"PATCH",
    b"TRACE",
    b"CONNECT",
    b"PRI",
    b"get",
    b"G ET",
    b"SOURCE",
    b"FOO",
]
METHODS += [b"PO\tST", b"", b"\xc3POST", b"M-SEARCH", b"DESCRIBE"]
TARGETS = [
    b"*",
    b"",
    b"/a b",
    b"/\0",
    b"/\xe9",
    b"/#f",
    b"//x",
    b"http://h/p",
    b"HTTP://h",
    b"http://",
    b"h:80",
    b"/\t",
    b"/" + b"p" * 9000,
]
TARGETS += [b"/%", b"/%zz", b"/a?b#c", b"ftp://h/", b"http:/p", b"http://u@h/p?q"]
VERSIONS = [
    b"HTTP/1.0",
    b"HTTP/0.9",
    b"HTTP/2.0",
    b"HTTP/1.2",
    b"http/1.1",
    b"RTSP/1.0",
    b"ICE/1.0",
    b"HTTP/11",
    b"HTTP/1.",
    b"",
    b"HTTP/1.1 x",
]
VERSIONS += [b"HTTP/1.10", b"HTTP/01.1", b"HTTP /1.1", b"HTTP/1,1", b"XTTP/1.1"]
ANSWERED_VERSIONS = [version for version in VERSIONS if version[:3] != b"ICE"]  # shorter than HTTP: cannot be relaxed
HOSTS = [
    b"Host:",
    b"Host: a b",
    b"Host: a\r\nHost: b",
    b"Host: a, b",
    b"host: [::1]:80",
    b"Host: a/b",
    b"Host: a:x@b",
    b"Host\t: a",
]
STATUSES = [
    b"204",
    b"304",
    b"404",
    b"500",
    b"201",
    b"206",
    b"100",
    b"101",
    b"103",
    b"199",
    b"000",
    b"099",
    b"20",
    b"2000",
    b"-20",
    b"2 0",
    b"+20",
]
REASONS = [b"", b" ", b" OK\0", b" O\rK", b" \xe9", b" " + b"r" * 5000, b"\tOK", b" OK\nX: y"]


class Maker:
    """Makes messages; the same seed makes the same ones.

    Args:
        random: where every choice comes from.
        odds: that one part of a message is odd.
    """

    def __init__(self, random: Random, odds: float = 0.04) -> None:
        self.random = random
        self._odds = odds

    def requests(self) -> bytes:
        """Make the bytes of a connection to the router: one to three requests, then one that closes it."""
        parts = [self._request() for _ in range(self.random.choice((1, 1, 2, 3)))]
        return self._damaged(b"".join(parts) + b"GET /last HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n")

    def answers(self) -> bytes:
        """Make the bytes of a connection to a replica: interim answers, an answer, sometimes more behind it."""
        random = self.random
        early = b"".join(self._interim() for _ in range(random.choice((0, 0, 0, 1, 2))))
        behind = self._answer() if random.random() < 0.05 else b""
        return self._damaged(early + self._answer() + behind)

    def cuts(self, data: bytes) -> list[bytes]:
        """Take the bytes apart as a network might: whole mostly, in a few pieces, or each by itself."""
        kind = self.random.random()
        if kind < 0.5:
            return [data] if data else []
        if kind > 0.97 and len(data) < 1000:
            return [data[i : i + 1] for i in range(len(data))]
        at = sorted(self.random.randrange(len(data) + 1) for _ in range(self.random.choice((1, 1, 2, 4))))
        return [data[start:end] for start, end in zip([0, *at], [*at, len(data)], strict=True) if start < end]

    def _mostly(self, sound: bytes, odd: Sequence[bytes]) -> bytes:
        return self.random.choice(odd) if self.random.random() < self._odds else sound

    def _end(self) -> bytes:
        return self._mostly(CRLF, LINE_ENDS) if self.random.random() < 0.3 else CRLF

    def _request(self) -> bytes:
        line = b" ".join(
            (self._mostly(b"POST", METHODS), self._mostly(b"/v1/x?y=z", TARGETS), self._mostly(b"HTTP/1.1", VERSIONS))
        )
        lines = [self._mostly(b"Host: a", HOSTS)] if self.random.random() > self._odds / 2 else []
        if self.random.random() < 0.1:
            lines.append(b"Expect: " + self._mostly(b"100-continue", [b"100-Continue", b"x", b"", b"100-continue, x"]))
        if self.random.random() < self._odds:
            lines += [b"Connection: Upgrade", b"Upgrade: " + self.random.choice((b"h2c", b"websocket", b""))]
        return self._message(line, lines)

    def _interim(self) -> bytes:
        line = b"HTTP/1.1 " + self._mostly(
            self.random.choice((b"100 Continue", b"103 Early Hints")), [b"101 Switch", b"199 x"]
        )
        headers = self.random.choice(
            (b"", b"", b"Link: x\r\n", b"Content-Length: 3\r\n", b"Transfer-Encoding: chunked\r\n")
        )
        return line + self._end() + headers + self._end()

    def _answer(self) -> bytes:
        status = self.random.choice(STATUSES[:6]) if self.random.random() < 0.15 else self._mostly(b"200", STATUSES)
        line = self._mostly(b"HTTP/1.1", ANSWERED_VERSIONS) + b" " + status + self._mostly(b" OK", REASONS)
        return self._message(line, [b"Content-Type: text/plain"])

    def _message(self, line: bytes, lines: list[bytes]) -> bytes:
        framing, body = self._framed()
        lines = [*lines, *framing]
        if self.random.random() < 2 * self._odds:
            lines.append(b"Connection: " + self.random.choice(CONNECTIONS))
        for _ in range(self.random.choice((0, 1, 2))):
            lines.append(self._mostly(b"X-B: c", ODD_LINES))
        self.random.shuffle(lines)
        return b"".join(part + self._end() for part in (line, *lines)) + self._end() + body

    def _framed(self) -> tuple[list[bytes], bytes]:
        """Return the headers that say how long the body is, and the body."""
        kind = self.random.random() - 1.5 * self._odds
        body = bytes(self.random.choices(b"abc0\r\n:", k=self.random.choice((0, 1, 5, 5, 16, 300))))
        length = self._header(b"Content-Length", self._mostly(b"%d" % len(body), LENGTHS))
        chunked = self._header(b"Transfer-Encoding", self._mostly(b"chunked", CODINGS))
        if kind < 0.0:
            both = self.random.random() < 0.7
            return [length, chunked] if both else [], self.random.choice((body, self._chunks(body)))
        if kind < 0.1:
            return [], b""
        if kind < 0.45:
            extra = [self._header(b"content-length", b"%d" % self.random.choice((len(body), 3)))]
            short = body[: -self.random.randrange(1, 3)] if self.random.random() < self._odds else body  # truncated
            return [length, *(extra if self.random.random() < self._odds else [])], short
        return [chunked, *([chunked] if self.random.random() < self._odds else [])], self._chunks(body)

    def _header(self, name: bytes, value: bytes) -> bytes:
        form = self._mostly(b"%b", NAMES)
        return form % name + self._mostly(b": ", [b":", b" : ", b":\t", b": \r\n ", b"=", b""]) + value

    def _chunks(self, body: bytes) -> bytes:
        parts = []
        while body:
            size = self.random.randrange(1, len(body) + 1)
            told = size + self.random.choice((-1, 1, 16)) if self.random.random() < self._odds / 3 else size
            parts += [self._size(told), self._end(), body[:size], self._end()]
            body = body[size:]
        if self.random.random() < self._odds:
            return b"".join(parts)  # truncated
        trailers = [
            self._mostly(b"X-T: u", ODD_LINES) + self._end() for _ in range(self.random.choice((0, 0, 0, 1, 2)))
        ]
        return b"".join(
            [
                *parts,
                self._mostly(b"0", [b"00", b"0;x", b"0 ", b"", b"-0", b"0x0"]),
                self._end(),
                *trailers,
                self._end(),
            ]
        )

    def _size(self, size: int) -> bytes:
        form = self._mostly(b"%x", SIZES)
        return form % size if b"%" in form else form

    def _damaged(self, data: bytes) -> bytes:
        random = self.random
        if random.random() < 0.6:
            return data
        damaged = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.randrange(len(damaged) + 1)
            what = random.randrange(6)
            if what == 0:
                damaged[at : at + 1] = bytes([random.randrange(256)])
            elif what == 1:
                del damaged[at : at + random.choice((1, 1, 2, 8))]
            elif what == 2:
                start = random.randrange(len(damaged) + 1)
                damaged[at:at] = damaged[start : start + random.randrange(40)]
            elif what == 3:
                del damaged[at:]
            else:
                damaged[at:at] = random.choice(PIECES)
        return bytes(damaged)
