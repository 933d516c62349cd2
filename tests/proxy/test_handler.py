"""The public door: routes, methods, sizes, keys, errors, headers; against simulated replicas on real sockets."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvroute.proxy.handler import HandlerSettings
from kvroute.proxy.openai import ROUTES
from kvroute.proxy.tenants import Tenants
from tests.adapters.scripted import OK, Turn, scripted
from tests.proxy.harness import chat, closed_port, pool

CHAT = "/v1/chat/completions"
MANAGEMENT = ["/metrics", "/sleep", "/reset_prefix_cache", "/v1/load_lora_adapter", "/collective_rpc", "/_state", "/"]


async def ok(turn: Turn) -> None:
    await turn.send(OK)


@pytest.mark.parametrize("path", MANAGEMENT)
async def test_management_routes_are_not_there(path: str):
    """What is no inference route never reaches a replica; the 404 has OpenAI's shape and an id."""
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        async with it.session.post(it.url + path, json={}, headers={"X-Request-Id": "r-1"}) as answer:
            body = await answer.json()
            assert (answer.status, answer.headers["X-Request-Id"]) == (404, "r-1")
        assert (body["error"]["type"], body["error"]["code"]) == ("NotFoundError", 404)
        assert server.turns == []


@pytest.mark.parametrize("path", ROUTES)
async def test_inference_routes_are_passed(path: str):
    """Every route of the list reaches a replica under its own path, query and all."""
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        async with it.session.post(f"{it.url}{path}?a=b%20c&d", json={"model": "sim"}) as answer:
            assert (answer.status, await answer.read()) == (200, b"ok")
        assert server.turns[0].head.startswith(b"POST %b?a=b%%20c&d HTTP/1.1\r\n" % path.encode())


@pytest.mark.parametrize(("method", "path", "allowed"), [("GET", CHAT, "POST"), ("POST", "/v1/models", "GET")])
async def test_wrong_method(method: str, path: str, allowed: str):
    """A wrong method is refused with the right one named."""
    async with pool(urls=[]) as it, it.session.request(method, it.url + path) as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, allowed)
        assert (await answer.json())["error"]["code"] == 405


async def test_models():
    """Every model of the pool is listed once."""
    async with pool(2) as it, it.session.get(f"{it.url}/v1/models") as answer:
        assert [card["id"] for card in (await answer.json())["data"]] == ["sim"]


async def test_unknown_model():
    """An unknown model gets vLLM's words without a replica being asked."""
    async with pool(1) as it, it.session.post(it.url + CHAT, json=chat() | {"model": "nope"}) as answer:
        assert answer.status == 404
        assert (await answer.json())["error"]["message"] == "The model `nope` does not exist. Valid aliases: sim."


async def test_no_model():
    """A request that names no model is served where there is only one."""
    body = chat()
    del body["model"]
    async with pool(1) as it, it.session.post(it.url + CHAT, json=body) as answer:
        assert answer.status == 200


async def test_no_model_among_several():
    """Where there are several models, the choices are named."""
    body = chat()
    del body["model"]
    async with (
        pool(urls=["http://127.0.0.1:1"], models=("a", "b")) as it,
        it.session.post(it.url + CHAT, json=body) as got,
    ):
        assert got.status == 400
        assert "a, b" in (await got.json())["error"]["message"]


async def test_bad_json():
    """A body that is no JSON is refused, and no replica is asked."""
    async with pool(1) as it:
        async with it.session.post(it.url + CHAT, data=b'{"model": ') as answer:
            assert answer.status == 400
            assert "not valid JSON" in (await answer.json())["error"]["message"]
        assert it.stats.requests == {("refused", 400): 1}


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large(chunked: bool):
    """A body above the limit is refused, whether its length is told or not."""

    async def parts():
        for _ in range(64):
            yield bytes(1024)

    async with pool(1, handler=HandlerSettings(body_bytes_max=32 << 10)) as it:
        data = parts() if chunked else bytes(64 << 10)
        async with it.session.post(it.url + CHAT, data=data) as answer:
            assert answer.status == 413
            assert "32768 bytes" in (await answer.json())["error"]["message"]


async def test_bytes_reach_the_replica_unchanged():
    """Unknown fields, spacing and numbers of a body are forwarded byte for byte."""
    body = b'{ "model":"sim","messages":[{"role":"odd","content":"\\u00e9"}], "x_unknown":1.50,\n"n":1e0 }'
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        async with it.session.post(it.url + CHAT, data=body) as answer:
            assert answer.status == 200
        assert server.turns[0].body == body


async def test_compressed_body_is_not_unpacked():
    """An encoded body is forwarded as it is, with its encoding."""
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        sent = {"Content-Encoding": "gzip", "Content-Type": "application/json"}
        async with it.session.post(it.url + CHAT, data=b"\x1f\x8bzipped", headers=sent) as answer:
            assert answer.status == 200
        assert server.turns[0].body == b"\x1f\x8bzipped"
        assert b"content-encoding: gzip" in server.turns[0].head.lower()


async def test_headers_to_the_replica():
    """Credentials stay here; the request's id, custom headers and the content type go on."""
    sent = {"Authorization": "Bearer c", "Cookie": "a=b", "X-Request-Id": "r-1", "X-Custom": "y"}
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        async with it.session.post(it.url + CHAT, json=chat(), headers=sent) as answer:
            assert answer.headers["X-Request-Id"] == "r-1"
        head = server.turns[0].head.lower()
    assert b"authorization" not in head
    assert b"cookie" not in head
    assert b"x-request-id: r-1\r\n" in head
    assert b"x-custom: y\r\n" in head
    assert b"host: %b\r\n" % server.url.removeprefix("http://").encode() in head


async def test_headers_to_the_client():
    """The answer says which replica gave it, and nothing about predictions unless that is configured."""
    async with pool(1) as it, it.session.post(it.url + CHAT, json=chat()) as answer:
        assert answer.headers["x-kvroute-replica"] == it.replicas[0]
        assert len(answer.headers["X-Request-Id"]) == 32
        assert not [name for name in answer.headers if "predicted" in name.lower() or "cost" in name.lower()]


async def test_keys():
    """Where keys are configured, a request without one is refused; with one, it is the key's tenant's."""
    async with pool(1, tenants=Tenants({"team-a": "sk-1"})) as it:
        async with it.session.post(it.url + CHAT, json=chat()) as answer:
            assert (answer.status, answer.headers["WWW-Authenticate"]) == (401, "Bearer")
        async with it.session.post(it.url + CHAT, json=chat(), headers={"Authorization": "Bearer sk-1"}) as answer:
            assert answer.status == 200
        assert any(field == "tenant=team-a|requests" for _, field, _ in it.account.drain())


async def test_no_replica_has_been_seen():
    """Before any replica was seen a request waits, and is served once there is one."""
    async with pool(1) as it:
        served = dict(it.catalogue._served)
        it.catalogue.replace({})
        asking = asyncio.ensure_future(it.session.post(it.url + CHAT, json=chat()))
        await it.eventually(lambda: it.stats.held, "the request waits")
        it.catalogue.replace(served)
        it.changed.set()
        async with await asking as answer:
            assert answer.status == 200


async def test_no_replica_at_all():
    """Where none comes within the wait, the client is told when to come back."""
    async with pool(urls=[]) as it:
        it.catalogue.replace({})
        async with it.session.post(it.url + CHAT, json=chat()) as answer:
            assert (answer.status, answer.headers["Retry-After"]) == (503, "1")
            assert (await answer.json())["error"]["type"] == "ServiceUnavailableError"


async def test_our_own_mistake():
    """A mistake of the router's becomes a 500 of OpenAI's shape; nothing is booked after it."""
    async with pool(1) as it:
        it.index._rooms = None  # what no code path may do, so that some code path fails
        async with it.session.post(it.url + CHAT, json=chat()) as answer:
            body = await answer.json()
        assert (answer.status, body["error"]["type"]) == (500, "InternalServerError")
        assert (it.stats.unexpected_errors, it.in_flight()) == (1, 0)


async def raw(url: str, data: bytes, answers: int) -> list[tuple[bytes, bytes]]:
    """Speak HTTP by hand; returns head and body of so many answers with a length."""
    reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
    writer.write(data)
    found = []
    for _ in range(answers):
        head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5)
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
        found.append((head, await reader.readexactly(int(lengths[0][15:])) if lengths else b""))
    writer.close()
    await writer.wait_closed()
    return found


def request(version: str = "1.1", *extra: str) -> tuple[bytes, bytes]:
    body = json.dumps(chat()).encode()
    lines = [
        f"POST {CHAT} HTTP/{version}",
        "Host: x",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        *extra,
        "",
        "",
    ]
    return "\r\n".join(lines).encode(), body


async def test_pipelined_requests():
    """Two requests sent at once on one connection are answered in order."""
    async with pool(1) as it:
        head, body = request()
        answers = await raw(it.url, (head + body) * 2, 2)
        assert [found[0].split(b"\r\n")[0] for found in answers] == [b"HTTP/1.1 200 OK"] * 2


async def test_body_in_broken_chunks():
    """A body whose framing is broken is refused, and is no mistake of the router's."""
    async with pool(1) as it:
        head = f"POST {CHAT} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n".encode()
        ((answer, _),) = await raw(it.url, head, 1)
        assert answer.split(b" ")[1] == b"400"
        assert it.stats.unexpected_errors == 0


async def test_http_1_0():
    """A client of HTTP/1.0 is answered and its connection closed."""
    async with pool(1) as it:
        head, body = request("1.0")
        ((answer, _),) = await raw(it.url, head + body, 1)
        assert answer.startswith(b"HTTP/1.0 200 OK")
        assert b"transfer-encoding" not in answer.lower()


async def test_expect_continue():
    """A client that waits for 100 Continue gets it, and the replica never hears of it."""
    async with scripted(ok) as server, pool(urls=[server.url]) as it:
        head, body = request("1.1", "Expect: 100-continue")
        interim, (final, _) = await raw(it.url, head + body, 2)
        assert interim[0].startswith(b"HTTP/1.1 100 Continue")
        assert final.startswith(b"HTTP/1.1 200 OK")
        assert b"expect" not in server.turns[0].head.lower()


async def test_dead_replica_is_named():
    """Where every replica has failed, the error says which and how."""
    url = f"http://127.0.0.1:{closed_port()}"
    async with pool(urls=[url]) as it, it.session.post(it.url + CHAT, json=chat()) as answer:
        assert answer.status == 502
        assert url in (await answer.json())["error"]["message"]
