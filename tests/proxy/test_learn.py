"""Generated blocks reach the index, where they can be known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvroute.adapters.index import MemoryIndex, namespace_of
from kvroute.adapters.tokens import PromptReader, open_reader
from kvroute.kv.chain import root_of
from kvroute.kv.prompt import ChatPrompt, Prompt
from kvroute.proxy.learn import PENDING_MAX, Learner
from kvroute.proxy.relay import Delivery
from kvroute.proxy.stats import HandlerStats
from kvroute.routing.demand import Usage
from kvroute.routing.replica import ReplicaId

R0, ROOT, SIZE = ReplicaId("r0"), root_of("m"), 2
CHAT = ChatPrompt([{"role": "user", "content": "abcdef"}])
EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"%b"},"finish_reason":null}]}\n\n'


@pytest.fixture
async def reader(tmp_path: Path) -> AsyncIterator[PromptReader]:
    """A reader whose tokens are bytes."""
    alphabet = {char: number for number, char in enumerate(sorted(ByteLevel.alphabet()))}
    tokenizer = Tokenizer(BPE(vocab=alphabet, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    template = "<s>{{ messages[0].content }}</s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    made = await open_reader(str(tmp_path), None, "m", None)
    await made.start()
    assert made.mode == "local", made.why
    yield made
    await made.close()


class Lesson:
    """A learner, what it writes to, and a prompt of 8 tokens."""

    def __init__(self, reader: PromptReader, prompt: Prompt) -> None:
        self.reader, self.prompt, self.stats, self.index = reader, prompt, HandlerStats(), MemoryIndex()
        self.namespace = namespace_of("m", SIZE, reader.fingerprint)
        self.index.join(R0, self.namespace, 100)
        self.learner = Learner(self.index, self.stats)

    async def learn(self, prompt: Prompt | None = None, **what: object) -> int:
        """Learn from an answer; return how many blocks of the conversation the index then knows."""
        delivery = Delivery(**what)
        self.learner.learn(R0, self.reader, prompt or self.prompt, ROOT, delivery)
        await self.learner.settled()
        longer = ChatPrompt([{"role": "user", "content": "abcdef</s>ghij"}])
        whole = await self.reader.read(longer, block_size=SIZE, root=ROOT)
        (holding,) = (await self.index.match(self.namespace, [whole.chain])).holdings
        return holding.get(R0, 0)


@pytest.fixture
async def lesson(reader: PromptReader) -> Lesson:
    prompt = await reader.read(CHAT, block_size=SIZE, root=ROOT)
    assert prompt.tokens == 8
    return Lesson(reader, prompt)


async def test_stream(lesson: Lesson):
    """The blocks that a streamed answer filled are known, but for the last token, which the engine has not computed."""
    events = EVENT % b"gh" + EVENT % b"ij" + b"data: [DONE]\n\n"
    assert await lesson.learn(usage=Usage(8, 4), events=events) == 5  # 11 of 12 tokens
    assert (lesson.stats.answers_learnt, lesson.stats.answers_not_learnt) == (1, 0)


async def test_answer_in_one_piece(lesson: Lesson):
    """An answer that was not streamed teaches as well."""
    assert await lesson.learn(usage=Usage(8, 4), text="ghij") == 5


@pytest.mark.parametrize(
    ("usage", "text"), [(Usage(8, 7), "ghij"), (Usage(8, 4), ""), (None, "ghij")], ids=["count", "empty", "none"]
)
async def test_nothing_false_is_claimed(lesson: Lesson, usage: Usage | None, text: str):
    """Where the tokens of the answer cannot be known, nothing is learnt."""
    assert await lesson.learn(usage=usage, text=text) == 0


async def test_guessed_prompts_teach_nothing(lesson: Lesson):
    """Behind a prompt that was only estimated, no answer can be placed."""
    estimate = Prompt(lesson.prompt.chain, 8, SIZE, exact=False)
    assert await lesson.learn(prompt=estimate, usage=Usage(8, 4), text="ghij") == 0


async def test_pending_answers_are_bounded(lesson: Lesson):
    """When more answers wait than may, the rest is let go; closing lets go of all."""
    delivery = Delivery(usage=Usage(8, 4), text="ghij")
    for _ in range(PENDING_MAX + 3):
        lesson.learner.learn(R0, lesson.reader, lesson.prompt, ROOT, delivery)
    assert lesson.stats.answers_not_learnt == 3
    await lesson.learner.close()
    assert lesson.stats.answers_learnt == 0
