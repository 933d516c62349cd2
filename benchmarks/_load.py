"""The client side of a benchmark: prompts, with the usage that an engine would state for them, over few connections."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from _engine import ANSWER, BLOCK_SIZE
from tokenizers import Tokenizer

PATH = b"POST /v1/chat/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: "
Message = dict[str, str]


@dataclass(frozen=True)
class Kind:
    """How the prompts of a measurement come to be."""

    name: str
    body_bytes: int  # of the average request
    turns: int  # requests a conversation; 1 = every prompt is new from its first word
    is_stream: bool = False


class Writer:
    """Makes requests; the same seed makes the same ones."""

    def __init__(self, tokenizer: Tokenizer, corpus: str, seed: int) -> None:
        self.tokenizer, self.corpus = tokenizer, corpus
        self.rng = random.Random(seed)
        self.answer_tokens = len(tokenizer.encode(ANSWER, add_special_tokens=False).ids)

    def conversation(self, kind: Kind) -> list[bytes]:
        """Return the requests of one conversation, in order."""
        turn_bytes = kind.body_bytes // 8 if kind.turns > 1 else kind.body_bytes
        start_bytes = kind.body_bytes - turn_bytes * (kind.turns - 1) // 2
        messages = [{"role": "user", "content": self.text(start_bytes)}]
        requests, held = [], 0
        for _ in range(kind.turns):
            prompt = self.count(messages)
            cached = min(held, prompt - 1) // BLOCK_SIZE * BLOCK_SIZE
            requests.append(self.request(messages, kind, (prompt, self.answer_tokens, cached)))
            held = prompt + self.answer_tokens - 1
            messages.append({"role": "assistant", "content": ANSWER})
            messages.append({"role": "user", "content": self.text(turn_bytes)})
        return requests

    def text(self, size: int) -> str:
        """Return a passage of the corpus that no other text begins like."""
        start = self.rng.randrange(len(self.corpus) - size)
        return f"{self.rng.getrandbits(64):x} {self.corpus[start : start + size - 17]}"

    def count(self, messages: list[Message]) -> int:
        """Count the tokens of the messages as the chat template renders them."""
        turns = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
        return len(self.tokenizer.encode(turns + "<|im_start|>assistant\n", add_special_tokens=False).ids)

    @staticmethod
    def request(messages: list[Message], kind: Kind, report: tuple[int, int, int]) -> bytes:
        body = {"model": "bench", "messages": messages, "max_tokens": 64, "stream": kind.is_stream, "report": report}
        data = json.dumps(body, separators=(",", ":")).encode()
        return b"%b%d\r\n\r\n%b" % (PATH, len(data), data)


class Connection(asyncio.Protocol):
    """One connection that sends conversations, each request after the answer to the one before."""

    def __init__(self, conversations: Iterator[Iterable[bytes]]) -> None:
        self.done = asyncio.get_running_loop().create_future()
        self.requests = (request for conversation in conversations for request in conversation)
        self.answered, self.data = 0, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.send()

    def send(self) -> None:
        if (request := next(self.requests, None)) is not None:
            self.transport.write(request)
        else:
            self.transport.close()
            self.done.set_result(self.answered)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if not self.is_complete():
            return
        if not self.data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(self.data[:500].decode(errors="replace")))
            self.transport.close()
            return
        self.answered, self.data = self.answered + 1, b""
        self.send()

    def is_complete(self) -> bool:
        head, found, rest = self.data.partition(b"\r\n\r\n")
        if not found:
            return False
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            return self.data.endswith(b"\r\n0\r\n\r\n")
        at = lower.index(b"content-length:") + 15
        return len(rest) >= int(lower[at:].split(b"\r\n", 1)[0])

    def connection_lost(self, error: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(error or ConnectionError("the router closed the connection"))


async def send(port: int, conversations: list[list[bytes]], connections: int) -> int:
    """Send all requests over so many connections and return how many were answered."""
    shared = iter(conversations)
    loop = asyncio.get_running_loop()
    pairs = [await loop.create_connection(lambda: Connection(shared), "127.0.0.1", port) for _ in range(connections)]
    return sum(await asyncio.gather(*(protocol.done for _, protocol in pairs)))
