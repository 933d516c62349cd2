"""Usage asked for in a body whose other bytes stay as they are."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.proxy.openai import parse
from kvroute.proxy.splice import EDIT_BYTES_MAX, asks_for_usage, with_usage

CHAT = "/v1/chat/completions"
TEXTS = st.text(max_size=8) | st.sampled_from(["stream_options", '"stream_options":{}', "}{][", "\\", '\\"'])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXTS, inner, max_size=4),
    max_leaves=8,
)
OPTIONS = st.none() | st.dictionaries(
    st.sampled_from(["include_usage", "continuous_usage_stats"]), st.none() | st.just(False)
).map(lambda options: {**options, "x": [{"include_usage": 1}]})


def spliced(body: bytes) -> bytes | None:
    return with_usage(body, parse(CHAT, body))


@st.composite
def bodies(draw: st.DrawFn) -> bytes:
    """Draw the text of a streaming chat, spaced and escaped in any way, in which keys may come twice."""
    members = draw(st.lists(st.tuples(TEXTS.filter(lambda key: key not in ("stream", "n")), VALUES), max_size=5))
    members = [(key, draw(OPTIONS) if key == "stream_options" else value) for key, value in members]
    for member in (("stream", True), ("messages", [{"role": "user", "content": draw(TEXTS)}])):
        members.insert(draw(st.integers(0, len(members))), member)
    space = draw(st.sampled_from(["", " ", "\n\t "]))
    ascii_only = draw(st.booleans())

    def dump(value: object) -> str:
        text = json.dumps(value, ensure_ascii=ascii_only, separators=("," + space, ":" + space))
        return text.replace("stream_options", "stream\\u005foptions") if draw(st.booleans()) else text

    inner = f"{space},{space}".join(f"{dump(key)}{space}:{space}{dump(value)}" for key, value in members)
    return f"{space}{{{space}{inner}{space}}}{space}".encode("utf-8", "surrogatepass")


@given(bodies())
def test_only_the_options_change(body: bytes):
    """The new body says what the old one said, with usage asked for, and no key comes more often than before."""
    new = spliced(body)
    before = json.loads(body)
    if new is None:  # lone surrogates, which only Python's decoder reads
        assert b"\xed" in body or "\\ud" in body.decode("utf-8", "replace")
        return
    after = json.loads(new)
    options = after.pop("stream_options")
    old = before.pop("stream_options", None) or {}
    assert after == before
    assert options.pop("include_usage") is True
    assert not options.pop("continuous_usage_stats", False)
    assert options == {
        key: value for key, value in old.items() if key not in ("include_usage", "continuous_usage_stats")
    }
    pairs, old_pairs = (json.loads(text, object_pairs_hook=list) for text in (new, body))
    known = [key for key, _ in old_pairs]
    assert sorted(key for key, _ in pairs) == sorted(known + ["stream_options"] * ("stream_options" not in known))


@given(bodies())
def test_all_other_bytes_stay(body: bytes):
    """What was put in or replaced is one stretch; before and after it every byte is as it was."""
    new = spliced(body)
    if new is None:
        return
    same_start = next((i for i, (a, b) in enumerate(zip(body, new, strict=False)) if a != b), len(body))
    rest = body[same_start:]
    while rest and not new.endswith(rest):
        rest = rest[1:]
    gone = body[same_start : len(body) - len(rest)]
    assert new.startswith(body[:same_start])
    assert len(gone) == 0 or b"stream_options" in body or b"\\u005f" in body


def test_front():
    """Without options they are put in front of the first member."""
    body = b' {"stream": true, "messages": [{}]}'
    assert spliced(body) == b' {"stream_options":{"include_usage":true},"stream": true, "messages": [{}]}'


def test_edit():
    """Options that are there are replaced where they stand, and continuous usage, without effect before, stays off."""
    body = b'{"stream": true, "stream_options": {"continuous_usage_stats": true, "x": 1}, "messages": [{}]}'
    wanted = b'{"continuous_usage_stats":false,"x":1,"include_usage":true}'
    assert spliced(body) == b'{"stream": true, "stream_options": %b, "messages": [{}]}' % wanted


@pytest.mark.parametrize(
    "fields",
    [
        {"stream": False},
        {"stream": 1},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "stream_options": {"include_usage": "yes"}},
        {"stream": True, "stream_options": "x"},
        {"stream": True, "n": 2},
        {"stream": True, "stream_options": {}, "padding": "x" * EDIT_BYTES_MAX},
        {"stream": True, "messages": []},
    ],
    ids=["no stream", "odd stream", "asked", "odd value", "odd options", "several", "too large to search", "no prompt"],
)
def test_left_alone(fields: dict[str, object]):
    """A body is left as it is where the client asked itself, where there is no one stream, or where it is odd."""
    assert spliced(json.dumps({"messages": [{}]} | fields).encode()) is None


def test_several_prompts_are_left_alone():
    """With several prompts the fingerprints of the first ones could not be put back in time."""
    body = b'{"stream": true, "prompt": ["a", "b"]}'
    assert with_usage(body, parse("/v1/completions", body)) is None


def test_who_asks():
    """A client asks for usage with a true include_usage."""
    ask = b'{"stream": true, "stream_options": {"include_usage": %b}}'
    assert asks_for_usage(parse(CHAT, ask % b"true"))
    assert not asks_for_usage(parse(CHAT, ask % b"false"))
