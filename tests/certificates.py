"""Certificates made at test time: an authority that nobody trusts yet, and what it signed for 127.0.0.1."""

from __future__ import annotations

import asyncio
import ssl
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

CHUNK_BYTES = 1 << 16


@dataclass(frozen=True)
class Certificates:
    """PEM files."""

    authority: Path
    certificate: Path
    key: Path

    def server(self) -> ssl.SSLContext:
        """A server's side with these files."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self.key)
        return context


def make_certificates(folder: Path) -> Certificates:
    """Make an authority and a certificate for 127.0.0.1 and localhost."""
    made = Certificates(folder / "authority.pem", folder / "certificate.pem", folder / "key.pem")
    secret = folder / "authority-key.pem"
    new = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    of_authority = ["-subj", "/CN=a private authority", "-keyout", str(secret), "-out", str(made.authority)]
    of_server = ["-subj", "/CN=server", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    signed = ["-CA", str(made.authority), "-CAkey", str(secret), "-addext", "basicConstraints=critical,CA:FALSE"]
    files = ["-keyout", str(made.key), "-out", str(made.certificate)]
    for command in ([*new, *of_authority], [*new, *of_server, *signed, *files]):
        subprocess.run(command, check=True, capture_output=True)
    return made


@asynccontextmanager
async def terminated(port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Speak TLS before a plain loopback port, as a sidecar does; yields the port."""
    pipes: set[asyncio.Task[None]] = set()

    async def pipe(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(CHUNK_BYTES):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass  # one side is gone: the other one is told
        finally:
            sink.close()

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        both = {asyncio.create_task(pipe(reader, far_writer)), asyncio.create_task(pipe(far_reader, writer))}
        pipes.update(both)
        await asyncio.wait(both)

    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=context)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for task in pipes:
            task.cancel()
        await asyncio.gather(*pipes, return_exceptions=True)
