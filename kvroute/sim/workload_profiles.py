"""Seeded generators of workloads: what published benchmarks send, and what production looks like.

Each takes its figures (a Struct whose fields are the parameters of the command line), a block size and a seed, and
returns scripts in the order of their starts, made as they are needed.

  shared-prefix  groups with one system prompt each (llm-d's benchmark: 150 groups x 5 prompts, 6,000 + 1,200 + 1,000
                 tokens, Poisson arrivals in stages from 3 to 60 requests a second; benchmarking/73-capacity of
                 llm-d-kv-cache-manager). Its 750 prompts are played again and again; `fresh` asks new questions.
                 Stages are those of its load generator, inference-perf: each has rate x seconds requests, begins with
                 the first prompt again, and waits until the one before it has ended
  chat           conversations of Zipf-distributed users with a few assistants
  rag            the top documents of a Zipf distribution, in an order that differs from request to request
  agent          tool loops: a long tool list for each kind of agent, a repository, a context that is compacted
  peak           chat, and 5 % of documents of 64,000 tokens that arrive together in a few bursts
  day            agents whose runs begin ever more often until noon, and ever less often after it
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator
from heapq import merge
from itertools import accumulate
from math import exp, log, pi, sin, sqrt
from random import Random
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from kvroute.errors import ConfigError
from kvroute.sim.workload import Script, Story, Turn, Workload

STAGES = (  # requests a second x seconds; the first warms up
    "15x50,3x20,10x20,15x20,20x38,22x34,25x30,30x25,35x21,40x38,43x36,46x33,49x30,52x29,55x27,57x26,60x25"
)
TURNS_MAX = 10_000

Drawn = Annotated[int, Meta(ge=1)]  # things that are made one by one, as they are needed
Listed = Annotated[int, Meta(ge=1, le=10_000)]  # things that are listed before the first request
Tokens = Annotated[int, Meta(ge=1, le=10_000_000)]
Some = Annotated[int, Meta(ge=0, le=10_000_000)]  # tokens of a part that may be missing
Rate = Annotated[float, Meta(ge=1e-6, le=1e6)]
Share = Annotated[float, Meta(ge=0, lt=1)]


class SharedPrefix(Struct, frozen=True, kw_only=True):
    """Groups that share a system prompt each."""

    groups: Listed = 150
    prompts: Listed = 5  # questions of each group
    system: Some = 6000  # tokens, as are the next two
    question: Tokens = 1200
    output: Tokens = 1000
    spread: Share = 0.0  # lengths of question and answer differ by up to this share
    fresh: bool = False  # every question is new
    drained: bool = True  # a stage waits until the one before it has ended; else it comes at its time
    stages: str = STAGES


class Chat(Struct, frozen=True, kw_only=True):
    """Conversations that grow."""

    sessions: Drawn = 600
    users: Listed = 200
    personas: Listed = 8
    system: Some = 400  # tokens of an assistant's prompt
    profile: Some = 150  # tokens about the user
    question: Tokens = 120
    output: Tokens = 300
    turns: float = 6.0
    think: float = 20.0  # seconds
    zipf: float = 1.0
    rate: Rate = 1.0  # conversations a second


class Rag(Struct, frozen=True, kw_only=True):
    """Retrieved documents before each question."""

    requests: Drawn = 2000
    documents: Listed = 500
    top: Drawn = 5
    document: Tokens = 1500  # tokens
    system: Some = 300
    question: Tokens = 60
    output: Tokens = 250
    zipf: float = 1.0
    ordered: float = 0.0  # share of requests whose documents come in one fixed order
    rate: Rate = 5.0  # requests a second


class Agent(Struct, frozen=True, kw_only=True):
    """Tool loops."""

    sessions: Drawn = 60
    kinds: Listed = 4  # of agents, each with its tool list
    repositories: Listed = 20
    tools: Tokens = 10_000  # tokens
    repository: Some = 4000
    task: Tokens = 800
    output: Tokens = 300
    result: Tokens = 1200
    turns: float = 30.0
    think: float = 4.0  # seconds that a tool takes
    context: Tokens = 128_000  # tokens, at which the conversation is compacted
    rate: Rate = 0.1  # runs a second


class Peak(Struct, frozen=True, kw_only=True):
    """Chat and bursts of long documents."""

    chat: Chat = Chat(sessions=400)
    share: Share = 0.05  # of all conversations
    document: Tokens = 64_000  # tokens
    bursts: Listed = 4
    width: float = 2.0  # seconds in which a burst arrives
    asked: Listed = 2  # requests about each document
    output: Tokens = 300


class Day(Struct, frozen=True, kw_only=True):
    """Agents under a load that rises and falls."""

    agent: Agent = Agent()  # its `rate` and `sessions` have no say
    low: Rate = 0.05  # runs a second at dawn and at dusk
    high: Rate = 0.5  # at noon
    span: Annotated[float, Meta(ge=1, le=1e6)] = 1800.0  # seconds from dawn to dusk


class Zipf:
    """Numbers from 0, the k-th with a weight of 1 / (k + 1)^s."""

    def __init__(self, count: int, s: float) -> None:
        self._sums = list(accumulate(1 / (k + 1) ** s for k in range(count)))

    def draw(self, rng: Random) -> int:
        """Return one."""
        return min(bisect_left(self._sums, rng.random() * self._sums[-1]), len(self._sums) - 1)


def lognormal(rng: Random, mean: float, variation: float, most: int = 1 << 24) -> int:
    """Return a length of that mean; `variation` is the standard deviation over the mean."""
    square = log(1 + variation * variation)
    return max(1, min(most, round(exp(rng.gauss(log(mean) - square / 2, sqrt(square))))))


def geometric(rng: Random, mean: float) -> int:
    """Return a count from 1 of that mean."""
    if mean <= 1:
        return 1
    return min(1 + int(log(1 - rng.random()) / log(1 - 1 / mean)), TURNS_MAX)


def poisson(rng: Random, rate: float, count: int) -> Iterator[float]:
    """Yield `count` times of a Poisson process."""
    at_s = 0.0
    for _ in range(count):
        at_s += rng.expovariate(rate)
        yield at_s


def stages_of(text: str) -> list[tuple[float, float]]:
    """Read stages: requests a second x seconds, separated by commas.

    Raises:
        ConfigError: they are written differently.
    """
    try:
        stages = [(float(rate), float(span)) for rate, _, span in (part.partition("x") for part in text.split(","))]
    except ValueError:
        stages = []
    if not stages or not all(0 < rate < 1e6 and 0 < span < 1e7 for rate, span in stages):
        raise ConfigError(f"stages: {text!r} is not RATExSECONDS,RATExSECONDS,...", param="stages")
    return stages


def staged(rng: Random, stages: list[tuple[float, float]]) -> Iterator[tuple[float, float, int]]:
    """Yield arrivals of a Poisson process whose rate changes: when a stage begins, when one comes, its number in it.

    A stage has as many as its rate promises, as inference-perf counts them; the last ones may come after its end.
    """
    begin_s = 0.0
    for rate, span_s in stages:
        at_s = begin_s
        for number in range(int(rate * span_s)):
            at_s += rng.expovariate(rate)
            yield begin_s, at_s, number
        begin_s = max(begin_s + span_s, at_s)


def shared_prefix(figures: SharedPrefix, block_size: int, rng: Random) -> Workload:
    """Groups x prompts in a shuffled order, again and again, from the first on in each stage."""
    order = [(group, prompt) for group in range(figures.groups) for prompt in range(figures.prompts)]
    rng.shuffle(order)
    systems = [Story(block_size).tell(f"system {group}", figures.system) for group in range(figures.groups)]

    def length(mean: int) -> int:
        return max(1, round(mean * (1 + figures.spread * (2 * rng.random() - 1)))) if figures.spread else mean

    for number, (stage_s, start_s, place) in enumerate(staged(rng, stages_of(figures.stages))):
        group, prompt = order[place % len(order)]
        question = f"fresh {number}" if figures.fresh else f"question {group} {prompt}"
        story = systems[group].fork().tell(question, length(figures.question))
        turn = story.ask(f"answer {number}", length(figures.output))
        opens = figures.drained and not place
        yield Script(start_s, iter((turn,)), stage_s=stage_s if opens else None)


def chat(figures: Chat, block_size: int, rng: Random) -> Workload:
    """Conversations."""
    users, personas = Zipf(figures.users, figures.zipf), Zipf(figures.personas, 1.0)
    favourite = [personas.draw(rng) for _ in range(figures.users)]
    for number, start_s in enumerate(poisson(rng, figures.rate, figures.sessions)):
        user = users.draw(rng)
        story = Story(block_size).tell(f"persona {favourite[user]}", figures.system)
        story.tell(f"user {user}", figures.profile)
        yield Script(
            start_s, _chat_turns(figures, story, f"chat {number}", Random(rng.getrandbits(64))), f"user {user}"
        )


def _chat_turns(figures: Chat, story: Story, name: str, rng: Random) -> Iterator[Turn]:
    think_s = 0.0
    for turn in range(geometric(rng, figures.turns)):
        question = lognormal(rng, figures.question, 1.5)
        new_tokens = question if turn else 0
        story.tell(f"{name} question {turn}", question)
        yield story.ask(f"{name} answer {turn}", lognormal(rng, figures.output, 0.8, 4000), think_s, new_tokens)
        think_s = rng.expovariate(1 / figures.think) if figures.think else 0.0


def rag(figures: Rag, block_size: int, rng: Random) -> Workload:
    """Popular documents in shuffled order."""
    documents = Zipf(figures.documents, figures.zipf)
    lengths = [lognormal(rng, figures.document, 0.5) for _ in range(figures.documents)]
    top = min(figures.top, figures.documents)
    for number, start_s in enumerate(poisson(rng, figures.rate, figures.requests)):
        picked: dict[int, None] = {}
        while len(picked) < top:
            picked[documents.draw(rng)] = None
        story = Story(block_size).tell("rag", figures.system)
        for document in sorted(picked) if rng.random() < figures.ordered else picked:
            story.tell(f"document {document}", lengths[document])
        story.tell(f"question {number}", lognormal(rng, figures.question, 0.8))
        yield Script(start_s, iter((story.ask(f"answer {number}", lognormal(rng, figures.output, 0.6)),)))


def agent(figures: Agent, block_size: int, rng: Random) -> Workload:
    """Runs of agents."""
    return _agents(figures, block_size, rng, poisson(rng, figures.rate, figures.sessions))


def _agents(figures: Agent, block_size: int, rng: Random, starts_s: Iterator[float]) -> Workload:
    kinds, repositories = Zipf(figures.kinds, 1.0), Zipf(figures.repositories, 1.0)
    tools = [lognormal(rng, figures.tools, 0.3) for _ in range(figures.kinds)]
    for number, start_s in enumerate(starts_s):
        kind, repository = kinds.draw(rng), repositories.draw(rng)
        head = Story(block_size).tell(f"tools {kind}", tools[kind]).tell(f"repository {repository}", figures.repository)
        head.tell(f"run {number} task", lognormal(rng, figures.task, 1.0))
        yield Script(start_s, _agent_turns(figures, head, f"run {number}", Random(rng.getrandbits(64))))


def _agent_turns(figures: Agent, head: Story, name: str, rng: Random) -> Iterator[Turn]:
    story, think_s, new_tokens = head.fork(), 0.0, 0
    for turn in range(geometric(rng, figures.turns)):
        yield story.ask(f"{name} call {turn}", lognormal(rng, figures.output, 1.2, 4000), think_s, new_tokens)
        new_tokens = lognormal(rng, figures.result, 1.5, 20_000)
        story.tell(f"{name} result {turn}", new_tokens)
        if story.tokens > figures.context:
            story = head.fork().tell(f"{name} summary {turn}", 3000)
        think_s = rng.expovariate(1 / figures.think) if figures.think else 0.0


def peak(figures: Peak, block_size: int, rng: Random) -> Workload:
    """Chat, with documents in bursts among it."""
    talk = figures.chat
    span_s = talk.sessions / talk.rate
    count = round(talk.sessions * figures.share / (1 - figures.share))
    times = sorted(
        (span_s * (number % figures.bursts + 0.5) / figures.bursts + rng.random() * figures.width, number)
        for number in range(count)
    )

    def documents() -> Iterator[Script]:
        for start_s, number in times:
            story = Story(block_size).tell("persona 0", talk.system)
            story.tell(f"long {number // (figures.bursts * figures.asked)} {number % figures.bursts}", figures.document)
            story.tell(f"long question {number}", 60)
            turn = story.ask(f"long answer {number}", lognormal(rng, figures.output, 0.8, 4000))
            yield Script(start_s, iter((turn,)), "documents")

    chats = chat(talk, block_size, Random(rng.getrandbits(64)))
    return merge(chats, documents(), key=lambda script: script.start_s)


def day(figures: Day, block_size: int, rng: Random) -> Workload:
    """Runs of agents that begin between dawn and dusk."""
    return _agents(figures.agent, block_size, rng, daylong(Random(rng.getrandbits(64)), figures))


def daylong(rng: Random, figures: Day) -> Iterator[float]:
    """Yield the times of a Poisson process whose rate goes from `low` to `high` and back as a sine's square does."""
    most, at_s = max(figures.low, figures.high), 0.0
    while (at_s := at_s + rng.expovariate(most)) < figures.span:
        rate = figures.low + (figures.high - figures.low) * sin(pi * at_s / figures.span) ** 2
        if rng.random() * most < rate:
            yield at_s


PROFILES: dict[str, tuple[type[Struct], Callable[[Any, int, Random], Workload]]] = {
    "shared-prefix": (SharedPrefix, shared_prefix),
    "chat": (Chat, chat),
    "rag": (Rag, rag),
    "agent": (Agent, agent),
    "peak": (Peak, peak),
    "day": (Day, day),
}


def generated(name: str, parameters: dict[str, str], block_size: int, seed: int) -> Workload:
    """Return the workload of a profile; parameters are as written, `chat.turns` for those of a part.

    Raises:
        ConfigError: an unknown profile or parameter, or a value that is none.
    """
    if name not in PROFILES:
        raise ConfigError(f"no generator is named {name!r}; known are {', '.join(PROFILES)}")
    kind, make = PROFILES[name]
    nested: dict[str, Any] = {}
    for key, value in parameters.items():
        part, _, inner = key.rpartition(".")
        (nested.setdefault(part, {}) if part else nested)[inner] = value
    figures = _figures(name, kind, nested)
    return make(figures, block_size, Random(seed))


def _figures(name: str, kind: type[Struct], given: dict[str, Any]) -> Struct:
    known = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key, value in given.items():
        if key not in known:
            raise ConfigError(f"{name}: no parameter is named {key!r}; known are {', '.join(known)}")
        part = known[key].type
        if isinstance(value, dict) and isinstance(part, type) and issubclass(part, Struct):
            whole = {**msgspec.to_builtins(known[key].default), **value}
            given[key] = msgspec.to_builtins(_figures(f"{name}.{key}", part, whole))
    try:
        figures = msgspec.convert(given, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {error}") from None
    for key, value in msgspec.to_builtins(figures).items():
        if isinstance(value, int | float) and not isinstance(value, bool) and not 0 <= value < 1e9:
            raise ConfigError(f"{name}: {key} must be from 0 to 1,000,000,000, got {value}")
    return figures
