"""The door to the replicas: reuse of connections, what is sent, and the names of failures."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from pathlib import Path

import pytest

from kvroute.adapters.upstream import Upstream, UpstreamSettings
from kvroute.errors import Overloaded, ReplicaUnreachable
from kvroute.routing.replica import Replica, ReplicaId
from tests.adapters.scripted import OK, Turn, scripted


def replica_at(url: str, rank: int | None = None) -> Replica:
    return Replica(id=ReplicaId("r0"), url=url, rank=rank)


async def ok(turn: Turn) -> None:
    await turn.send(OK)


async def ask(upstream: Upstream, url: str, body: bytes = b"{}") -> bytes:
    answer = await upstream.send(replica_at(url), "POST", "/v1/completions?x=1", [(b"X-A", b"b")], body)
    found = b""
    while part := await answer.read():
        found += part
    return found


async def test_what_is_sent():
    """Target, Host, length, the replica's own key and its rank are added to the headers that were given."""
    async with scripted(ok) as server:
        upstream = Upstream(key_of=lambda replica: "secret")
        answer = await upstream.send(replica_at(server.url, rank=3), "POST", "/v1/x?y=1", [(b"X-A", b"b")], b"{}")
        assert await answer.read() == b"ok"
        await upstream.close()
    lines = server.turns[0].head.decode().split("\r\n")
    host = server.url.removeprefix("http://")
    assert lines[0] == "POST /v1/x?y=1 HTTP/1.1"
    assert {f"Host: {host}", "X-A: b", "Authorization: Bearer secret", "X-data-parallel-rank: 3"} < set(lines)
    assert "Content-Length: 2" in lines


async def test_path_of_the_url_comes_first():
    """A replica behind a path prefix is asked under that prefix."""
    async with scripted(ok) as server:
        upstream = Upstream()
        await ask(upstream, f"{server.url}/pool/a")
        await upstream.close()
    assert server.turns[0].head.startswith(b"POST /pool/a/v1/completions?x=1 HTTP/1.1\r\n")


async def test_connections_are_kept():
    """Requests one after the other share a connection; requests at the same time do not."""
    async with scripted(ok) as server:
        upstream = Upstream()
        for _ in range(3):
            await ask(upstream, server.url)
        assert server.connections == 1
        await asyncio.gather(*(ask(upstream, server.url) for _ in range(3)))
        assert server.connections == 3
        await upstream.close()


async def test_large_bodies_arrive_whole():
    """A body far larger than any buffer arrives as it was."""
    body = bytes(range(256)) * (32 << 10)
    async with scripted(ok) as server:
        upstream = Upstream()
        await ask(upstream, server.url, body)
        await upstream.close()
    assert server.turns[0].body == body


async def test_connection_that_died_meanwhile():
    """A kept connection that turns out to be dead costs nothing: the request is sent once more on a new one."""

    async def script(turn: Turn) -> None:
        if turn.number == 1:
            turn.cut()  # after the request arrived: the client cannot know in time
        else:
            await turn.send(OK)

    async with scripted(script) as server:
        upstream = Upstream()
        assert [await ask(upstream, server.url) for _ in range(2)] == [b"ok", b"ok"]
        assert (server.connections, upstream.reconnects) == (2, 1)
        await upstream.close()


async def test_new_connection_that_dies_is_not_tried_again():
    """On a new connection a closed socket is a failure, not an accident of timing."""

    async def script(turn: Turn) -> None:
        turn.cut()

    async with scripted(script) as server:
        upstream = Upstream()
        with pytest.raises(ReplicaUnreachable):
            await ask(upstream, server.url)
        assert server.connections == 1
        await upstream.close()


async def test_connection_that_the_replica_wants_closed():
    """After `Connection: close` the next request opens a new connection."""

    async def script(turn: Turn) -> None:
        await turn.send(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok")

    async with scripted(script) as server:
        upstream = Upstream()
        for _ in range(2):
            await ask(upstream, server.url)
        assert (server.connections, upstream.reconnects) == (2, 0)
        await upstream.close()


async def test_idle_connections_are_closed():
    """A connection is not kept longer than its time."""
    async with scripted(ok) as server:
        upstream = Upstream(UpstreamSettings(keep_alive_s=0.05))
        await ask(upstream, server.url)
        assert upstream.open_connections == 1
        for _ in range(100):
            await asyncio.sleep(0.02)
            if not upstream.open_connections:
                break
        assert upstream.open_connections == 0
        await ask(upstream, server.url)
        assert server.connections == 2
        await upstream.close()


async def test_nobody_listens():
    """A refused connection names the replica and the reason."""
    upstream = Upstream()
    async with scripted(ok) as server:
        url = server.url
    with pytest.raises(ReplicaUnreachable, match=r"127\.0\.0\.1.*refused|Connect call failed"):
        await ask(upstream, url)
    await upstream.close()


async def test_too_many_connections():
    """The number of connections to one URL is bounded; the client is told to come back."""

    async def script(turn: Turn) -> None:
        await turn.client_left()

    async with scripted(script) as server:
        upstream = Upstream(UpstreamSettings(connections_max=1))
        first = asyncio.ensure_future(ask(upstream, server.url))
        while not server.turns:
            await asyncio.sleep(0.01)
        with pytest.raises(Overloaded):
            await ask(upstream, server.url)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await upstream.close()


async def test_cancelled_while_waiting_for_the_head():
    """A request that is cancelled before any byte closes its connection at once."""
    left = asyncio.Event()

    async def script(turn: Turn) -> None:
        await turn.client_left()
        left.set()

    async with scripted(script) as server:
        upstream = Upstream()
        asking = asyncio.ensure_future(ask(upstream, server.url))
        while not server.turns:
            await asyncio.sleep(0.01)
        asking.cancel()
        await asyncio.wait_for(left.wait(), 5)
        await asyncio.gather(asking, return_exceptions=True)
        await upstream.close()
        assert upstream.open_connections == 0


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that nobody has signed."""
    folder = tmp_path_factory.mktemp("tls")
    key, cert = folder / "key.pem", folder / "cert.pem"
    what = ["-subj", "/CN=replica", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2", "-nodes"]
    made = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-keyout", str(key), "-out", str(cert), *what]
    subprocess.run(made, check=True, capture_output=True)
    return key, cert


async def test_tls(certificate: tuple[Path, Path]):
    """An https replica is spoken to over TLS where its authority is trusted or verification is off."""
    key, cert = certificate
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    async with scripted(ok, tls=context) as server:
        for verify in (str(cert), False):
            upstream = Upstream(UpstreamSettings(tls_verify=verify))
            assert await ask(upstream, server.url) == b"ok"
            await upstream.close()
        upstream = Upstream()
        with pytest.raises(ReplicaUnreachable, match=r"(?i)certificate"):
            await ask(upstream, server.url)
        await upstream.close()
