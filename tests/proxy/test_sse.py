"""What an event stream says, and what is taken out of it again; on streams recorded from vLLM."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.proxy.sse import (
    KEPT_BYTES_MAX,
    PARTIAL_BYTES_MAX,
    EventStream,
    Opening,
    error_event,
    events_of,
    failure_in,
    opening,
)
from tests.fake.wire import recorded

ERROR = (
    b'data: {"error": {"message": "EngineCore encountered an issue.", "type": "InternalServerError", "code": 500}}\n\n'
)
REFUSAL = b'data: {"error": {"message": "no such token", "type": "BadRequestError", "code": 400}}\n\n'
DONE = b"data: [DONE]\n\n"
ROLE = b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}\n\n'
TEXT = b'data: {"choices":[{"index":0,"delta":{"content":"a"},"finish_reason":null}]}\n\n'
ABORT = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"abort"}]}\n\n'
END = b'data: {"choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}]}\n\n'
USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2},"system_fingerprint":"f"}\n\n'


def stream_of(name: str) -> bytes:
    """The body of a recorded stream."""
    return recorded(name).answer.body.encode()


def fed(stream: EventStream, data: bytes, cuts: list[int] | None = None) -> bytes:
    """Feed data in pieces; return what was passed on."""
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts or ()), len(data)]
    return b"".join(stream.feed(data[a:b]) for a, b in itertools.pairwise(edges)) + stream.finish()


def without_usage(data: bytes) -> bytes:
    """What vLLM would have sent had nobody asked for usage: see recorded chat_stream for where the fingerprint goes."""
    events = list(events_of(data))
    usage = events.pop(-2)
    fingerprint = json.loads(usage[6:])["system_fingerprint"].encode()
    events[-2] = events[-2].replace(b"}\n\n", b',"system_fingerprint":"%b"}\n\n' % fingerprint)
    return b"".join(events)


@pytest.mark.parametrize(
    "name", ["chat_stream", "chat_stream_n2", "chat_stream_usage", "completion_stream_two_prompts"]
)
@given(cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_streams_pass_unchanged(name: str, cuts: list[int]):
    """However a stream is cut into packets, the client gets the same bytes."""
    data = stream_of(name)
    assert fed(EventStream(keeps_text=True), data, cuts) == data


@pytest.mark.parametrize("name", ["chat_stream_usage", "completion_stream_usage"])
@given(cuts=st.lists(st.integers(0, 10_000), max_size=8))
def test_usage_is_taken_out_again(name: str, cuts: list[int]):
    """The client sees the stream that it would have seen without our asking, byte for byte."""
    data = stream_of(name)
    stream = EventStream(strips_usage=True)
    assert fed(stream, data, cuts) == without_usage(data)
    assert b'"prompt_tokens":' in stream.usage_event


def test_a_single_byte_is_no_event():
    """The first byte of the usage event, come by itself, does not release what waits for that event."""
    data = stream_of("chat_stream_usage")
    cut = data.rindex(b"data: ", 0, data.rindex(b'"prompt_tokens":'))
    assert fed(EventStream(strips_usage=True), data, [cut, cut + 1]) == without_usage(data)


def test_fingerprint_goes_where_vllm_puts_it():
    """The last chunk has the same keys in the same order as in a stream recorded without usage."""
    stripped = fed(EventStream(strips_usage=True), stream_of("chat_stream_usage"))
    ours, theirs = (list(events_of(data))[-2] for data in (stripped, stream_of("chat_stream")))
    assert list(json.loads(ours[6:])) == list(json.loads(theirs[6:]))


@pytest.mark.parametrize("name", ["chat_stream", "completion_stream_two_prompts"])
def test_nothing_to_take_out(name: str):
    """A stream without usage passes unchanged, even where usage was asked for."""
    data = stream_of(name)
    assert fed(EventStream(strips_usage=True), data) == data


def test_engine_that_sends_usage_to_everybody():
    """Usage with every chunk is the engine's own setting; the client would have seen it without us too."""
    data = stream_of("chat_stream_usage_continuous")
    assert fed(EventStream(strips_usage=True), data) == data


def test_comment_while_the_last_chunk_is_held():
    """A comment between the last chunk and usage keeps its place."""
    comment = b": keep-alive\n\n"
    signed = END.replace(b"}\n\n", b',"system_fingerprint":"f"}\n\n')
    assert fed(EventStream(strips_usage=True), TEXT + END + comment + USAGE + DONE) == TEXT + signed + comment + DONE


def test_usage_that_never_comes():
    """The last chunk is not lost where something else than usage follows it, or nothing."""
    for rest in (DONE, ERROR, b""):
        assert fed(EventStream(strips_usage=True), TEXT + END + rest) == TEXT + END + rest


def test_words_inside_texts():
    """An answer that talks about usage and finish reasons is an answer like any other."""
    words = json.dumps('data: {"usage":{"x":1}} "finish_reason":"abort" {"error": 1}').encode()
    data = TEXT.replace(b'"a"', words) + END + USAGE + DONE
    stream = EventStream(strips_usage=True)
    assert fed(stream, data) == without_usage(data)
    assert stream.failure is None


def test_event_without_end():
    """An event that does not end is passed on before it fills the memory."""
    stream = EventStream()
    assert stream.feed(b"data: " + b"x" * PARTIAL_BYTES_MAX) != b""


def test_answers_are_kept_up_to_a_limit():
    """Of an answer that is too long nothing is kept, so that no part of it is taken for the whole."""
    stream = EventStream(keeps_text=True)
    stream.feed(TEXT)
    assert stream.kept == [TEXT]
    stream.feed(TEXT.replace(b'"a"', b'"%b"' % (b"x" * KEPT_BYTES_MAX)))
    assert stream.kept is None


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        (ROLE, Opening.WAIT),
        (ROLE + ROLE, Opening.WAIT),
        (TEXT, Opening.SERVED),
        (ROLE + TEXT, Opening.SERVED),
        (ROLE + ABORT, Opening.REFUSED),
        (ABORT, Opening.REFUSED),
        (ERROR, Opening.REFUSED),
        (ROLE + ERROR, Opening.REFUSED),
        (REFUSAL, Opening.SERVED),
        (END, Opening.SERVED),
        (DONE, Opening.SERVED),
        (b": keep-alive\n\n", Opening.SERVED),
        (b'event: message_start\ndata: {"type":"message_start"}\n\n', Opening.SERVED),
        (b'event: error\ndata: {"type":"error","error":{"type":"internal_error"}}\n\n', Opening.REFUSED),
        (b'data: {"choices":[{"delta":{"reasoning":"hm"}}]}\n\n', Opening.SERVED),
        (b'data: {"choices":[{"delta":{"tool_calls":[{"index":0}]}}]}\n\n', Opening.SERVED),
        (b'data: {"choices":[{"text":"","finish_reason":"abort"}]}\n\n', Opening.REFUSED),
        (b'data: {"choices":[{"text":"a"}]}\n\n', Opening.SERVED),
        (b"data: what\n\n", Opening.SERVED),
    ],
)
def test_opening(events: bytes, verdict: Opening):
    """The first events tell whether the engine serves the request, has not begun, or has given up."""
    assert opening(events) is verdict


@pytest.mark.parametrize(
    ("event", "failed"), [(ERROR, True), (ABORT, True), (REFUSAL, False), (TEXT, False), (END, False), (DONE, False)]
)
def test_failures(event: bytes, failed: bool):
    """An error of the engine and an abort are failures; its answer to a bad request is not."""
    assert bool(failure_in(event)) is failed


def test_failure_late_in_a_stream():
    """A stream that breaks says so, and the event itself is passed on."""
    stream = EventStream()
    assert fed(stream, TEXT + ERROR + DONE) == TEXT + ERROR + DONE
    assert stream.failure == "EngineCore encountered an issue."


def test_error_event():
    """Our own errors in a stream have the engine's form."""
    assert error_event(b'{"error":{}}') == b'data: {"error":{}}\n\n'
