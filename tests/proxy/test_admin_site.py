"""What admin listeners say when they are asked for something else, by HTTP clients and by others."""

from __future__ import annotations

import asyncio
import logging

import pytest
from aiohttp import web

from kvroute.proxy.admin_site import application, runner_of


@pytest.fixture
async def port():
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await request.read())

    app = application(body_bytes_max=100)
    app.add_routes([web.post("/echo", echo), web.get("/read", echo)])
    runner = runner_of(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    yield runner.addresses[0][1]
    await runner.cleanup()


async def said(port, data: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(data)
    answer = await reader.read()
    writer.close()
    return answer


def request(line: str, *headers: str, body: str = "") -> bytes:
    heads = ("Host: a", "Connection: close", f"Content-Length: {len(body)}", *headers)
    return "\r\n".join((line, *heads, "", body)).encode()


@pytest.mark.parametrize(
    ("data", "status", "message", "kind"),
    [
        (request("GET /nowhere HTTP/1.1"), 404, "There is no route /nowhere here", "NotFoundError"),
        (request("GET /echo HTTP/1.1"), 405, "/echo takes POST, not GET", "MethodNotAllowedError"),
        (request("POST /read HTTP/1.1"), 405, "/read takes GET, not POST", "MethodNotAllowedError"),
        (request("POST /echo HTTP/1.1", body="x" * 200), 413, "Maximum request body size 100 exceeded", "LargeError"),
        (request("POST /echo HTTP/1.1", "Sec-Fetch-Site: cross-site"), 403, "another site's page", "ForbiddenError"),
    ],
)
async def test_errors_have_the_public_listeners_shape(port, data, status, message, kind):
    """Status, type, code and a message stand in a JSON object, whoever found the error."""
    head, _, body = (await said(port, data)).decode().partition("\r\n\r\n")
    assert head.startswith(f"HTTP/1.1 {status} ")
    assert "Content-Type: application/json" in head
    assert message in body
    assert f'{kind}"' in body
    assert body.endswith(f'"param":null,"code":{status}}}}}')


async def test_a_method_that_is_not_taken_is_told_which_are(port):
    """`Allow` is kept, as HTTP asks for it."""
    assert b"\r\nAllow: POST\r\n" in await said(port, request("GET /echo HTTP/1.1"))


async def test_what_is_no_request_is_one_line_in_the_log(port, caplog):
    """A header that is too large is refused, and logged without the parser's stack."""
    with caplog.at_level(logging.DEBUG, "kvroute.admin"):
        answer = await said(port, request("POST /echo HTTP/1.1", "X-A: " + "a" * 100_000))
    assert answer.split()[1] == b"400"
    (record,) = caplog.records
    assert (record.exc_info, record.levelname) == (None, "WARNING")
    assert record.getMessage().startswith("a request cannot be read: ")
    assert "\n" not in record.getMessage()


async def test_an_order_of_ones_own_is_taken(port):
    """What is asked for as it should be is answered."""
    assert (await said(port, request("POST /echo HTTP/1.1", body="hello"))).endswith(b"\r\n\r\nhello")
