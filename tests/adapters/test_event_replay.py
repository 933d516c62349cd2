"""Questions to replay sockets: both frame forms, rubbish, silence, and endpoints where nobody is."""

from __future__ import annotations

import asyncio

import pytest
import zmq
import zmq.asyncio

from kvroute.adapters.event_replay import END_SEQ, ask

END = [b"", END_SEQ, b""]


def numbered(seq, *before):
    return [*before, seq.to_bytes(8, "big"), b"batch %d" % seq]


@pytest.fixture
async def asked():
    """Ask a socket that answers with the messages given; return what was taken, the question and whether it ended."""
    router = zmq.asyncio.Socket(zmq.Context.instance(), zmq.ROUTER)
    router.bind("tcp://127.0.0.1:*")

    async def run(messages, *, start=3, limit=100, **settings):
        async def serve():
            identity, *question = await router.recv_multipart()
            for message in messages:
                await router.send_multipart([identity, b"", *message])
            return question

        taken = []

        def take(seq, payload):
            taken.append((seq, payload))
            return len(taken) < limit

        serving = asyncio.create_task(serve())
        endpoint = router.getsockopt_string(zmq.LAST_ENDPOINT)
        is_complete = await ask(zmq.Context.instance(), endpoint, start, take, silence_s=0.3, **settings)
        return [seq for seq, _ in taken], await serving, is_complete

    yield run
    router.close(0)


@pytest.mark.parametrize("before", [[], [b"a topic"]])
async def test_the_answer_is_read_to_its_end_mark(asked, before):
    """With a topic before the number, and without one; the question has an empty frame and eight bytes."""
    messages = [numbered(seq, *before) for seq in (3, 4)] + [END if not before else [b"", *END]]
    assert await asked(messages) == ([3, 4], [b"", (3).to_bytes(8, "big")], True)


async def test_rubbish_in_an_answer_is_skipped(asked):
    """Too few frames, or a number of another length."""
    taken, _, is_complete = await asked([[b""], [b"x", b"123", b"y"], numbered(3), END])
    assert (taken, is_complete) == ([3], True)


async def test_an_answer_without_an_end_is_left_after_a_silence(asked):
    """What came is taken."""
    taken, _, is_complete = await asked([numbered(3), numbered(4)])
    assert (taken, is_complete) == ([3, 4], False)


async def test_an_answer_is_left_as_soon_as_it_is_not_needed(asked):
    """Because of what it says, or for another reason."""
    taken, _, is_complete = await asked([numbered(3), numbered(4), END], limit=1)
    assert (taken, is_complete) == ([3], False)
    async with asyncio.timeout(10):
        nobody = ask(zmq.Context.instance(), "tcp://127.0.0.1:9", 0, lambda *_: True, is_useless=lambda: True)
        assert await nobody is False


async def test_where_nobody_answers_there_is_an_end_too():
    """A port without a listener."""
    async with asyncio.timeout(10):
        assert await ask(zmq.Context.instance(), "tcp://127.0.0.1:9", 0, lambda *_: True, silence_s=0.3) is False


async def test_an_endpoint_that_cannot_be_one_is_an_error():
    """It is the caller's to report."""
    with pytest.raises(zmq.ZMQError):
        await ask(zmq.Context.instance(), "http://127.0.0.1:9", 0, lambda *_: True)
