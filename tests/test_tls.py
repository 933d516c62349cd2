"""TLS everywhere, on real processes: clients, replicas and Redis, with an authority that this machine does not know."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import ssl
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.certificates import Certificates, make_certificates, terminated
from tests.processes import Program, Router, SimulatedReplica, Valkey

pytestmark = pytest.mark.slow  # real processes, many of them

CHAT = {"model": "sim", "messages": [{"role": "user", "content": "word " * 200}], "max_tokens": 4}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("tls"))


@pytest.fixture
async def https_replica(tmp_path: Path, files: Certificates) -> AsyncIterator[str]:
    """A replica behind https."""
    with SimulatedReplica(log=tmp_path / "replica.log") as replica:
        async with terminated(int(replica.url.rpartition(":")[2]), files.server()) as port:
            yield f"https://127.0.0.1:{port}"


def chat(url: str, authority: Path | None = None, **fields: object) -> bytes:
    """Send a chat and return the answer."""
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps({**CHAT, **fields}).encode(), {"Content-Type": "application/json"}
    )
    context = None if authority is None else ssl.create_default_context(cafile=authority)
    with urllib.request.urlopen(request, timeout=30, context=context) as answer:
        return answer.read()


def settings(files: Certificates, **more: str) -> dict[str, str]:
    """Environment of a router whose listener speaks https."""
    shown = {"KVROUTE_PROXY__TLS_CERTIFICATE": str(files.certificate), "KVROUTE_PROXY__TLS_KEY": str(files.key)}
    return {**shown, **more}


@contextlib.asynccontextmanager
async def router(*args: str, log: Path, env: dict[str, str]) -> AsyncIterator[Router]:
    """Start a router while this loop goes on serving what it asks."""
    one = Router(*args, log=log, env=env)
    try:
        yield await asyncio.to_thread(one.start)
    finally:
        await asyncio.to_thread(one.stop)


@pytest.mark.parametrize("workers", ["1", "2"])
async def test_tls_on_every_side(tmp_path: Path, files: Certificates, https_replica: str, workers: str) -> None:
    """Chats and streams pass from https to https, with a store that is reached by rediss://, and hit the cache."""
    env = settings(files, KVROUTE_PROXY__TLS_CA=str(files.authority))
    with Valkey(tmp_path / "valkey.log") as valkey:
        async with terminated(valkey.port, files.server()) as port:
            store = f"rediss://127.0.0.1:{port}?ssl_ca_certs={files.authority}"
            args = ("--workers", workers, "--redis", store, https_replica)
            async with router(*args, log=tmp_path / "router.log", env=env) as one:
                assert one.url.startswith("https://")
                first = json.loads(await asyncio.to_thread(chat, one.url, files.authority))
                second = json.loads(await asyncio.to_thread(chat, one.url, files.authority))
                stream = await asyncio.to_thread(chat, one.url, files.authority, stream=True)
                log = one.text
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    assert cached[0] == 0 < cached[1]
    assert stream.endswith(b"data: [DONE]\n\n")
    assert f"rediss://127.0.0.1:{port} (connected)" in log


async def test_a_client_that_speaks_plain_http_or_does_not_trust_us(
    tmp_path: Path, files: Certificates, https_replica: str
) -> None:
    """Neither gets an answer, and the listener serves the next one."""
    env = settings(files, KVROUTE_PROXY__TLS_VERIFY="false")
    async with router(https_replica, log=tmp_path / "router.log", env=env) as one:
        with pytest.raises(OSError):  # noqa: PT011 - what it is called differs between versions of OpenSSL
            await asyncio.to_thread(chat, one.url.replace("https", "http"))
        with pytest.raises(urllib.error.URLError, match="CERTIFICATE_VERIFY_FAILED"):
            await asyncio.to_thread(chat, one.url)
        assert b"choices" in await asyncio.to_thread(chat, one.url, files.authority)


async def test_replicas_that_nobody_vouches_for_are_not_used(tmp_path: Path, https_replica: str) -> None:
    """Without the authority a replica never becomes healthy, and the log says that its certificate is why."""
    env = {"KVROUTE_PROXY__NO_REPLICA_WAIT_S": "0"}
    async with router(https_replica, log=tmp_path / "router.log", env=env) as one:
        with pytest.raises(urllib.error.HTTPError, match=r"503|404"):
            await asyncio.to_thread(chat, one.url)
        assert "CERTIFICATE_VERIFY_FAILED" in one.text


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_certificate_that_cannot_be_used_stops_the_start(tmp_path: Path, workers: str) -> None:
    """The setting and the file are named in one line, with the exit status of an error."""
    env = {"KVROUTE_PROXY__TLS_CERTIFICATE": str(tmp_path / "absent.pem")}
    one = Router("--workers", workers, "http://127.0.0.1:9", log=tmp_path / "router.log", env=env)
    Program.start(one)
    try:
        one.said(r"`proxy\.tls_certificate`: .*absent\.pem")
        assert one.process is not None
        assert one.process.wait(20) == 1
        assert "Traceback" not in one.text
    finally:
        one.stop()


async def test_a_renewed_certificate_is_shown_after_a_reload(tmp_path: Path, https_replica: str) -> None:
    """SIGHUP starts workers that read the files anew; no client sees a listener that is gone."""
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    shown, renewed = make_certificates(tmp_path / "first"), make_certificates(tmp_path / "second")
    env = settings(shown, KVROUTE_PROXY__TLS_VERIFY="false")
    args = ("--workers", "2", "--index", "redis", https_replica)
    async with router(*args, log=tmp_path / "router.log", env=env) as one:
        address = ("127.0.0.1", int(one.url.rpartition(":")[2]))
        before = await asyncio.to_thread(ssl.get_server_certificate, address)
        assert before.strip() == shown.certificate.read_text().strip()
        shown.certificate.write_bytes(renewed.certificate.read_bytes())
        shown.key.write_bytes(renewed.key.read_bytes())
        one.signal(signal.SIGHUP)
        async with asyncio.timeout(60):
            while await asyncio.to_thread(ssl.get_server_certificate, address) == before:
                await asyncio.sleep(0.1)
