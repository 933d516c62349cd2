"""From a request to sequences of the engine, and back to text and counts."""

from __future__ import annotations

import pytest

from kvroute.fake import text
from kvroute.fake.answers import Studio
from kvroute.fake.driver import Driver
from kvroute.fake.requests import Model, chat, completion
from kvroute.kv.pool import BlockPool
from kvroute.sim.engine import default_time
from kvroute.sim.replica import SimReplica

MODEL = Model("sim", 1000)


@pytest.fixture
async def studio():
    driver = Driver(SimReplica(BlockPool(65, 16), time=default_time(50)))
    await driver.start()
    yield Studio(driver, MODEL, seed=0)
    await driver.close()


def begin(studio, **fields):
    return studio.begin(completion({"prompt": [7] * 40, "max_tokens": 6, "ignore_eos": True, **fields}, MODEL))


async def played(performance):
    return [choice async for batch in performance.deltas() for choice in batch]


async def test_the_deltas_of_a_choice_make_up_its_answer(studio):
    """Pieces in order give the whole, only the last one has a reason, and none is told twice."""
    performance = begin(studio, n=2)
    deltas = await played(performance)
    for choice in performance.whole():
        pieces = [delta for delta in deltas if delta.index == choice.index]
        assert "".join(piece.text for piece in pieces) == choice.text
        assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["length"]


async def test_token_ids_are_given_where_they_were_asked_for(studio):
    """Ids of prompt and answer come back, the answer's in the pieces that their text comes in."""
    performance = begin(studio, return_token_ids=True)
    deltas = await played(performance)
    assert deltas[0].prompt_ids == [7] * 40
    assert "".join(text.piece_of(token) for delta in deltas for token in delta.token_ids) == performance.whole()[0].text


async def test_an_answer_that_ends_its_turn_has_a_token_for_that_and_no_text(studio):
    """The end-of-turn token is counted and not shown."""
    performance = begin(studio, max_tokens=900, ignore_eos=False)
    await played(performance)
    choice = performance.whole()[0]
    assert choice.finish_reason == "stop"
    assert "<|" not in choice.text
    assert performance.count().completion_tokens == len(text.encode(choice.text)) // 4 + 1


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, (40, 6, 0, None)),
        ({"n": 3}, (40, 18, 32, None)),
        ({"n": 3, "stream": True}, (40, 18, 0, None)),
        ({"prompt": [[7] * 40, [7] * 40]}, (80, 12, 32, None)),
        ({"prompt": [[7] * 40, [7] * 40, [8] * 40]}, (120, 18, 0, None)),
        ({"prompt": [[7] * 40, [7] * 40], "stream": True}, (80, 12, 0, None)),
    ],
)
async def test_counts_of_a_request(studio, fields, expected):
    """A prompt counts once; hits are those of one sequence, the first in a stream and else the last, as at vLLM."""
    performance = begin(studio, **fields)
    await played(performance)
    count = performance.count()
    found = (count.prompt_tokens, count.completion_tokens, count.cached_tokens, count.created_cache_tokens)
    assert found == expected


@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}])
@pytest.mark.parametrize("words", [0, 40])
async def test_a_chat_tells_what_is_new_in_the_cache(studio, fields, words):
    """Whole blocks of its prompt that were not there, none of a prompt that fills none."""
    body = {"messages": [{"role": "user", "content": "word " * words}], "max_tokens": 2, **fields}
    performance = studio.begin(chat(body, MODEL))
    await played(performance)
    count = performance.count()
    full = count.prompt_tokens // 16 * 16
    assert (full > 0) is (words > 0)
    hits = full if fields == {"n": 2} else 0
    assert (count.cached_tokens, count.created_cache_tokens) == (hits, full - hits)
