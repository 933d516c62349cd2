"""Multi-turn chats over shared system prompts, streamed, against any OpenAI endpoint.

    locust -f loadtests/locustfile.py --headless -u 20 -r 10 -t 30s --host http://127.0.0.1:8000

Beside the requests themselves, Locust's statistics hold, for each request: `TTFT`, the milliseconds until the first
event with text, and `tokens`, the prompt's tokens and how many of them came from a cache, where the endpoint tells. In
the rows of `tokens` the columns count tokens, not milliseconds. One line at
the end tells the hit rate of the whole run.
"""

from __future__ import annotations

import itertools
import json
import random
import time
from typing import Any

from locust import FastHttpUser, between, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import ResponseContextManager
from locust.env import Environment
from scenarios import Conversation, Shape

CHAT = "/v1/chat/completions"
NUMBERS = itertools.count()  # users of this process


@events.init_command_line_parser.add_listener
def add_options(parser: LocustArgumentParser) -> None:
    shape = Shape()
    group = parser.add_argument_group("conversations")
    group.add_argument("--groups", type=int, default=shape.groups, help="distinct system prompts")
    group.add_argument("--system-tokens", type=int, default=shape.system_tokens, help="length of each, about")
    group.add_argument("--turns", type=int, default=shape.turns, help="requests a conversation")
    group.add_argument("--question-tokens", type=int, default=shape.question_tokens, help="length of a user message")
    group.add_argument("--answer-tokens", type=int, default=shape.answer_tokens, help="max_tokens of a request")
    group.add_argument("--seed", type=int, default=shape.seed, help="the same seed gives the same words")
    group.add_argument("--model", default="", help="served name; empty takes the first of /v1/models")
    parser.add_argument("--api-key", default="", is_secret=True, help="sent as a bearer token")


@events.quitting.add_listener
def print_hit_rate(environment: Environment, **_: Any) -> None:
    """Tell the share of prompt tokens that came from a cache. Locust's totals hold the sums of all workers."""
    cached = environment.stats.get("cached", "tokens").total_response_time
    prompt = environment.stats.get("prompt", "tokens").total_response_time
    if prompt:
        print(f"hit rate {cached / prompt:.4f}: {cached:.0f} of {prompt:.0f} prompt tokens from a cache")


class BrokenStream(Exception):
    """A stream under status 200 that did not end as one should."""


class ChatUser(FastHttpUser):
    """Holds one conversation after another, reading each answer before the next question."""

    wait_time = between(0.1, 0.5)

    def on_start(self) -> None:
        options = self.environment.parsed_options
        names = ("groups", "system_tokens", "turns", "question_tokens", "answer_tokens", "seed")
        self.shape = Shape(**{name: getattr(options, name) for name in names})
        self.rng = random.Random(f"{options.seed}/{next(NUMBERS)}")
        self.headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self.model = options.model or self.first_model()

    def first_model(self) -> str:
        answer = self.client.get("/v1/models", headers=self.headers, name="models")
        return str(answer.json()["data"][0]["id"])

    @task
    def converse(self) -> None:
        conversation = Conversation(self.shape, self.rng)
        for _ in range(self.shape.turns):
            answer = self.ask(conversation)
            if answer is None:
                return  # counted as a failure; the next conversation starts afresh
            conversation.hear(answer)
            self.wait()

    def ask(self, conversation: Conversation) -> str | None:
        """Send one turn and read the stream to its end. Returns None where it failed."""
        body = {
            "model": self.model,
            "messages": conversation.ask(),
            "max_tokens": self.shape.answer_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        began = time.perf_counter()
        with self.client.post(
            CHAT, json=body, headers=self.headers, name="chat", stream=True, catch_response=True
        ) as response:
            if response.status_code != 200:
                response.failure(f"status {response.status_code}: {(response.text or '')[:200]}")
                return None
            try:
                return self.listen(response, began)
            except (BrokenStream, OSError, ValueError) as error:  # ValueError: what came is no HTTP or no JSON
                response.failure(error)
                return None
            finally:
                response.request_meta["response_time"] = 1000 * (time.perf_counter() - began)

    def listen(self, response: ResponseContextManager, began: float) -> str:
        """Read events until `[DONE]` and return the text.

        Raises:
            BrokenStream: the stream was cut, or carried an error.
        """
        text: list[str] = []
        size = 0
        while line := response.stream.readline(b"\n"):
            size += len(line)
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                response.request_meta["response_length"] = size
                return "".join(text)
            event = json.loads(line[6:])
            if "error" in event:
                raise BrokenStream(str(event["error"])[:200])
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    if not text:
                        self.count("TTFT", "first text", 1000 * (time.perf_counter() - began))
                    text.append(piece)
            if usage := event.get("usage"):
                self.count_tokens(usage)
        raise BrokenStream("ended without [DONE]")

    def count_tokens(self, usage: dict[str, Any]) -> None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        if cached is not None:
            self.count("tokens", "prompt", usage["prompt_tokens"])
            self.count("tokens", "cached", cached)

    def count(self, kind: str, name: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name=name, response_time=value, response_length=0, exception=None, context={}
        )
