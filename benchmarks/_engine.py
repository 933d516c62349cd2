"""The engine side: answers chats with what the request says it should, much cheaper than any router can pass them on.

    python benchmarks/_engine.py PORT [EVENTS [CHUNK_S]]

A body ends with `"report":[prompt,completion,cached]}`: the usage that a real engine would state for it. A streamed
body gets CHUNKS events, one every CHUNK_S seconds. /metrics, /health and /v1/models answer as vLLM does; so does
/kv_event_sources, where EVENTS is the endpoint of a publisher.
"""

from __future__ import annotations

import asyncio
import re
import sys
from typing import cast

import uvloop

CHUNKS = 200
CHUNK_S = float(sys.argv[3]) if len(sys.argv) > 3 else 0.004
ANSWER = "The answer is in the table above, in its second row."  # of every request
BLOCK_SIZE = 16
MODELS = b'{"object":"list","data":[{"id":"bench","object":"model","root":"bench","max_model_len":131072}]}'
METRICS = f"""\
vllm:num_requests_running{{engine="0",model_name="bench"}} 0.0
vllm:num_requests_waiting{{engine="0",model_name="bench"}} 0.0
vllm:kv_cache_usage_perc{{engine="0",model_name="bench"}} 0.0
vllm:cache_config_info{{block_size="{BLOCK_SIZE}",num_gpu_blocks="4000000",engine="0"}} 1.0
""".encode()
SOURCES = b'{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"%b","replay_endpoint":null,"topic":""}}'
REPORT = re.compile(rb'"report":\[(\d+),(\d+),(\d+)\]\}$')
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


def whole(kind: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: %b\r\nContent-Length: %d\r\n\r\n%b" % (kind, len(body), body)


def usage(prompt: int, completion: int, cached: int) -> bytes:
    return (
        b'"usage":{"prompt_tokens":%d,"total_tokens":%d,"completion_tokens":%d,"prompt_tokens_details":'
        b'{"cached_tokens":%d}}' % (prompt, prompt + completion, completion, cached)
    )


def answer(prompt: int, completion: int, cached: int) -> bytes:
    return whole(
        b"application/json",
        b'{"id":"chatcmpl-1","object":"chat.completion","created":1,"model":"bench","choices":[{"index":0,"message":'
        b'{"role":"assistant","content":"%b"},"finish_reason":"length"}],%b}'
        % (ANSWER.encode(), usage(prompt, completion, cached)),
    )


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1,"model":"bench",'
DELTA = EVENT + b'"choices":[{"index":0,"delta":{"content":" word"},"finish_reason":null}]}\n\n'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class Connection(asyncio.Protocol):
    """One keep-alive connection; requests come one after another."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport, self.data = cast(asyncio.Transport, transport), b""  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        self.data += data
        head, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return
        length = int(match[1]) if (match := LENGTH.search(head)) else 0
        if len(rest) >= length:
            self.data = b""
            self.reply(head, rest)

    def reply(self, head: bytes, body: bytes) -> None:
        if report := REPORT.search(body[-80:]):
            prompt, completion, cached = map(int, report.groups())
            if b'"stream":true' in body:
                self.transport.write(HEAD)
                last = EVENT + b'"choices":[],%b}\n\n' % usage(prompt, CHUNKS, cached)
                asyncio.get_running_loop().call_later(CHUNK_S, self.pour, CHUNKS, last)
            else:
                self.transport.write(answer(prompt, completion, cached))
        elif b" /kv_event_sources " in head[:40] and len(sys.argv) > 2 and sys.argv[2]:
            self.transport.write(whole(b"application/json", SOURCES % sys.argv[2].encode()))
        elif b" /metrics " in head[:40]:
            self.transport.write(whole(b"text/plain; version=0.0.4", METRICS))
        else:
            self.transport.write(whole(b"application/json", MODELS))

    def pour(self, left: int, last: bytes) -> None:
        if self.transport.is_closing():
            return
        if left:
            self.transport.write(chunk(DELTA))
            asyncio.get_running_loop().call_later(CHUNK_S, self.pour, left - 1, last)
        else:
            self.transport.write(chunk(last) + chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")


async def main() -> None:
    server = await asyncio.get_running_loop().create_server(Connection, "127.0.0.1", int(sys.argv[1]))
    print(f"engine on {sys.argv[1]}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(main())
