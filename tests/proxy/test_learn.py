"""Generated blocks reach the index, where they can be known."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from kvroute.adapters.index import MemoryIndex, namespace_of
from kvroute.adapters.tokens import PromptReader, open_reader
from kvroute.kv.chain import TokenBytes, chain_of, root_of, tokens_of
from kvroute.kv.prompt import ChatPrompt, Prompt
from kvroute.proxy.learn import PENDING_MAX, Learner, completes_block
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
async def lesson(reader: PromptReader) -> AsyncIterator[Lesson]:
    prompt = await reader.read(CHAT, block_size=SIZE, root=ROOT)
    assert prompt.tokens == 8
    lesson = Lesson(reader, prompt)
    await lesson.learner.start()
    yield lesson
    await lesson.learner.close()


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


@pytest.mark.parametrize(("completion", "is_read"), [(1, False), (2, False), (3, True)])
async def test_an_answer_that_completes_no_block_is_not_read(lesson: Lesson, completion: int, is_read: bool):
    """Only where whole blocks were added is there anything to learn, so only then is an answer looked at."""
    await lesson.learn(usage=Usage(8, completion), text="ghi"[:completion])
    assert lesson.stats.answers_learnt == is_read
    assert lesson.stats.answers_not_learnt == 0


@given(st.integers(0, 40), st.integers(1, 40), st.integers(1, 8))
def test_what_completes_a_block(prompt: int, completion: int, size: int):
    """It is the whole blocks of all tokens but the last that count, with those that the prompt began."""
    ids = tokens_of(range(prompt))
    tail = TokenBytes(ids[prompt // size * size * 4 :])
    made = Prompt(chain_of(ids, size, ROOT), prompt, size, tail)
    assert completes_block(made, Usage(prompt, completion)) == ((prompt + completion - 1) // size > prompt // size)


async def test_an_answer_that_breaks_the_reader_costs_only_itself(lesson: Lesson):
    """Whatever reading an answer raises, the next answers are learnt."""
    wrong = Delivery(usage=Usage(8, 4), text=b"no text")
    lesson.learner.learn(R0, lesson.reader, lesson.prompt, ROOT, wrong)
    assert await lesson.learn(usage=Usage(8, 4), text="ghij") == 5
    assert (lesson.stats.answers_learnt, lesson.stats.answers_not_learnt) == (1, 1)


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
