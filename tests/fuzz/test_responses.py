"""The connection to a replica against answers that are wrong in every way, with h11 as the reference.

Of a hundred thousand connections none may give an answer that h11 does not read, or reads otherwise; none may be taken
for whole where h11 misses something; and none may be used again where h11 would not.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass, field
from random import Random

import h11
import pytest

from kvroute.adapters.connection import Connection, Patience
from kvroute.errors import ReplicaFailed
from tests.fuzz.messages import Maker
from tests.fuzz.wire import Wire

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n"
PATIENCE = Patience(first_byte_s=60.0, idle_s=60.0)


@dataclass
class Got:
    """What was read of one answer."""

    status: int = 0
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    is_whole: bool = False
    is_reusable: bool = False  # the connection, before the replica closed it


def relaxed(data: bytes) -> bytes:
    """Take away what llhttp passes over in a status line and h11 does not; no length changes.

    That is the name of a protocol that looks like HTTP, and what the phrase is made of. Neither goes any further.
    """

    def sound(line: re.Match[bytes]) -> bytes:
        return b"HTTP%b%b" % (line[1], b"-" * len(line[2]))

    return re.sub(rb"^(?:HTTP|RTSP)(/\d\.\d \d{3} )([^\r\n]*)", sound, data, flags=re.MULTILINE)


def reference(data: bytes) -> Got:
    """Read as h11 does: bytes, then the end of the connection."""
    got, data, is_open = Got(), relaxed(data), True
    client = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 17)
    client.send(h11.Request(method="POST", target="/", headers=[("Host", "a"), ("Content-Length", "2")]))
    client.send(h11.Data(data=b"{}"))
    client.send(h11.EndOfMessage())
    try:
        client.receive_data(data)
        while not got.is_whole:
            event = client.next_event()
            if isinstance(event, h11.Response):
                got.status, got.headers = event.status_code, list(event.headers)
            elif isinstance(event, h11.InformationalResponse) and event.status_code != 101:
                return reference(client.trailing_data[0].lstrip(b"\r\n"))  # llhttp passes over empty lines there
            elif isinstance(event, h11.Data):
                got.body += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                got.is_whole = True
                is_done = client.their_state is h11.DONE and client.our_state is h11.DONE
                got.is_reusable = (
                    is_done and is_open and not client.trailing_data[0].strip(b"\r\n")
                )  # llhttp skips empty lines
            elif event is h11.NEED_DATA:
                client.receive_data(b"")
                is_open = False
            elif event is h11.PAUSED or isinstance(event, h11.ConnectionClosed):
                break
    except h11.RemoteProtocolError:
        pass
    return got


async def received(parts: list[bytes], leniency: str = "") -> Got:
    """Read the same as the router does."""
    got = Got()
    connection = Connection(asyncio.get_running_loop(), lambda connection: None)
    if leniency:
        connection._parser.set_dangerous_leniencies(**{leniency: True})
    wire = Wire(connection)
    answer = connection.exchange(HEAD, b"{}", replica="r0", patience=PATIENCE)
    for part in parts:
        wire.say(part)
        await asyncio.sleep(0)
    got.is_reusable = answer.complete and connection.is_usable
    wire.hang_up()
    try:
        await answer.head()
        got.status = answer.status
        got.headers = [(name.lower(), value.strip(b" \t")) for name, value in answer.headers]
        while part := await answer.read():
            got.body += part
        got.is_whole = True
    except ReplicaFailed:
        pass
    await connection.closed
    return got


def plain(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Write values in which case means nothing in lower case, as h11 does."""
    return [(name, value.lower() if name == b"transfer-encoding" else value) for name, value in headers]


async def compare(connections: int, seed: int, leniency: str = "") -> float:
    """Compare on so many connections; return the share of h11's whole answers that the router reads too."""
    maker = Maker(Random(seed))
    ours = theirs = 0
    for _ in range(connections):
        data = maker.answers()
        expected = reference(data)
        got = await received(maker.cuts(data), leniency)
        if got.status:
            assert (got.status, plain(got.headers)) == (expected.status, expected.headers), data
        body = relaxed(got.body)
        assert expected.body.startswith(body), data
        if got.is_whole:
            assert (expected.is_whole, body) == (True, expected.body), data
        assert expected.is_reusable or not got.is_reusable, data
        ours, theirs = ours + got.is_whole, theirs + expected.is_whole
    return ours / theirs


async def test_sound_answers_are_all_read():
    """Where nothing is odd the router reads every answer that h11 reads, and uses the connection again."""
    maker = Maker(Random(3), odds=0.0)
    for _ in range(100):
        data = maker._answer()
        got = await received(maker.cuts(data))
        expected = reference(data)
        assert (got.status, got.body, got.is_whole) == (expected.status, expected.body, expected.is_whole), data
        assert got.is_reusable == expected.is_reusable, data


async def test_reads_nothing_that_h11_does_not_read():
    """Two thousand answers, in each run of the unit tests."""
    assert await compare(2_000, seed=1) > 0.5


@pytest.mark.parametrize(
    "leniency",
    [
        "lenient_headers",
        "lenient_optional_lf_after_cr",
        "lenient_optional_cr_before_lf",
        "lenient_optional_crlf_after_chunk",
        "lenient_spaces_after_chunk_size",
    ],
)
async def test_the_comparison_sees_what_it_is_for(leniency):
    """A parser that is lenient in a single way is found out: the answers are odd in that way, too."""
    with pytest.raises(AssertionError):
        await compare(3_000, seed=1, leniency=leniency)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_reads_nothing_that_h11_does_not_read_at_length(seed):
    """A hundred thousand answers in all."""
    assert await compare(25_000, seed) > 0.5
