"""The public listener against requests that are wrong in every way, with h11 as the reference.

Of a hundred thousand connections none may bring the handler a request that h11 does not read, or reads otherwise; and
what the router answers must be whole answers to those requests.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from random import Random

import h11
import pytest

from kvroute.errors import BadRequest
from kvroute.proxy.client import Client, ClientPatience
from kvroute.proxy.exchange import Exchange
from kvroute.proxy.request import Request
from tests.fuzz.messages import Maker
from tests.fuzz.reference import Read, normal, reference
from tests.fuzz.wire import Wire

BODY_BYTES_MAX = 1 << 20
TURNS = 6  # of the loop, in which a connection does all that it can do with what it got


def as_read(request: Request, body: bytes) -> Read:
    return request.method, request.target, request.version, normal(request.headers), body


@dataclass
class Handled:
    """What came of a connection's bytes."""

    seen: list[Read] = field(default_factory=list)  # requests that arrived whole
    methods: list[str] = field(default_factory=list)  # of requests that were begun
    refused: list[int] = field(default_factory=list)  # statuses
    answers: bytes = b""


async def handled(parts: list[bytes], *, reads: bool = True, leniency: str = "") -> Handled:
    """Send bytes to the router's parser; `reads`: the handler wants bodies, else it answers without them."""
    it = Handled()

    async def handle(exchange: Exchange) -> None:
        it.methods.append(exchange.request.method)
        try:
            body = await exchange.body(BODY_BYTES_MAX) if reads else b""
        except BadRequest as error:
            it.refused.append(error.status)
            exchange.respond(error.status, [], b"no")
            return
        it.seen.append(as_read(exchange.request, body))
        exchange.respond(200, [], b"some words")

    def nothing(client: Client) -> None:
        pass

    client = Client(handle, ClientPatience(), on_open=nothing, on_close=nothing, on_refused=it.refused.append)
    if leniency:
        client._parser.set_dangerous_leniencies(**{leniency: True})
    wire = Wire(client)
    for part in parts:
        wire.say(part)
        await asyncio.sleep(0)
    for _ in range(TURNS):
        await asyncio.sleep(0)
    client.end()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert client.task is not None
    assert client.task.done()
    assert wire.is_over
    it.answers = bytes(wire.written)
    return it


def count_answers(data: bytes, methods: list[str]) -> int:
    """Return how many whole answers h11 reads; fails on anything that is none, or on bytes that are left."""
    count = 0
    while data:
        client = h11.Connection(h11.CLIENT)
        method = methods[count] if count < len(methods) else "GET"
        client.send(h11.Request(method=method, target="/", headers=[("Host", "a")]))
        client.send(h11.EndOfMessage())
        client.receive_data(data)
        while not isinstance(event := client.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                return count if data.startswith(b"HTTP/1.1 100 Continue\r\n\r\n") else -1
        count += 1
        data = client.trailing_data[0]
    return count


async def compare(connections: int, seed: int, leniency: str = "") -> float:
    """Compare on so many connections; return the share of h11's requests that the router reads too."""
    maker = Maker(Random(seed))
    ours = theirs = 0
    for _ in range(connections):
        data = maker.requests()
        expected = reference(data)
        reads = maker.random.random() < 0.8
        it = await handled(maker.cuts(data), reads=reads, leniency=leniency)
        if reads:
            assert it.seen == expected[: len(it.seen)], data
        else:  # the last one may have been answered before h11 refuses its body
            assert it.seen[:-1] == [(*head, b"") for *head, _ in expected[: len(it.seen[:-1])]], data
        assert not any({b"content-length", b"transfer-encoding"} <= dict(read[3]).keys() for read in it.seen), data
        assert len(it.refused) <= 1, data
        assert count_answers(it.answers, it.methods) == len(it.seen) + len(it.refused), (data, it.answers)
        ours, theirs = ours + len(it.seen), theirs + len(expected)
    return ours / theirs


async def test_sound_requests_are_all_read():
    """Where nothing is odd the router reads every request that h11 reads, so the comparison is about something."""
    maker = Maker(Random(3), odds=0.0)
    for _ in range(50):
        data = b"".join(maker._request() for _ in range(3))
        assert (await handled(maker.cuts(data))).seen == reference(data), data


async def test_reads_nothing_that_h11_does_not_read():
    """Two thousand connections, in each run of the unit tests."""
    assert await compare(2_000, seed=1) > 0.5


@pytest.mark.parametrize(
    "leniency",
    [
        "lenient_headers",
        "lenient_chunked_length",
        "lenient_transfer_encoding",
        "lenient_optional_lf_after_cr",
        "lenient_optional_cr_before_lf",
        "lenient_optional_crlf_after_chunk",
        "lenient_spaces_after_chunk_size",
    ],
)
async def test_the_comparison_sees_what_it_is_for(leniency):
    """A parser that is lenient in a single way is found out: the requests are odd in that way, too."""
    with pytest.raises(AssertionError):
        await compare(3_000, seed=1, leniency=leniency)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 6))
async def test_reads_nothing_that_h11_does_not_read_at_length(seed):
    """A hundred thousand connections in all, of one to four requests each."""
    assert await compare(25_000, seed) > 0.5
