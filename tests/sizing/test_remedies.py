"""How close an engine is to its limit."""

import pytest

from kvroute.sizing.presets import preset
from kvroute.sizing.remedies import Usage, headroom


def usage(**changes):
    """An engine of 100,000 tokens, half full."""
    given = {"capacity_tokens": 100_000, "used_fraction": 0.5, "running": 5, "waiting": 0, "preemptions": 0}
    return Usage(**{**given, **changes})


def by_name(found):
    """Remedies by name."""
    return {remedy.name: remedy for remedy in found.remedies}


def test_room_left():
    """Half full with nobody waiting is not close, and the mean conversation tells how many fit."""
    found = headroom(usage())
    assert (found.close, found.used_tokens, found.mean_tokens, found.fitting) == (False, 50_000, 10_000, 10)
    assert found.state == "room for 50,000 tokens: 50% of 100,000 tokens held by 5 running requests, 0 waiting"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"used_fraction": 0.97}, "nearly full"),
        ({"used_fraction": 0.97, "preemptions": 7}, "more tokens are held than fit"),
        ({"used_fraction": 0.6, "waiting": 9}, "room for 40,000 tokens"),
    ],
)
def test_close_to_the_limit(changes, words):
    """Near 1, preempting, or waiting on a half-full cache is close."""
    found = headroom(usage(**changes))
    assert found.close
    assert words in found.state


def test_an_idle_engine_says_nothing():
    """Usage counts running requests only."""
    found = headroom(usage(used_fraction=0.0, running=0))
    assert "idle" in found.state
    assert (found.mean_tokens, found.fitting) == (None, None)


def test_the_four_remedies():
    """Half the length or bytes doubles what fits; memory adds in proportion; fewer requests end preemptions."""
    found = by_name(headroom(usage(used_fraction=1.0, running=8, waiting=6, preemptions=3), preset("llama-3.1-8b")))
    assert found["shorter context"].conversations == 16
    assert found["FP8 cache"].conversations == 16
    assert found["more memory"].conversations == 8 + 10 * 10**9 // (12_500 * 131_072)
    assert "--max-num-seqs 8 instead of 14 at once" in found["fewer concurrent requests"].what


def test_remedies_that_buy_nothing():
    """An FP8 cache gains nothing twice, states do not shrink with it, and what fits needs no limit."""
    assert "nothing more" in by_name(headroom(usage(cache_dtype="fp8_e4m3")))["FP8 cache"].what
    hybrid = by_name(headroom(usage(), preset("qwen3-next-80b")))["FP8 cache"]
    assert 10 < hybrid.conversations < 20
    assert "5 at once fit" in by_name(headroom(usage()))["fewer concurrent requests"].what
    assert by_name(headroom(usage()))["more memory"].conversations == 20


def test_more_memory_is_counted_in_the_engines_own_dtype():
    """10 GB hold twice the conversations where the engine keeps its cache in 8 bits."""
    wide, narrow = (by_name(headroom(usage(cache_dtype=dtype), preset("llama-3.1-8b"))) for dtype in ("auto", "fp8"))
    gained = [found["more memory"].conversations - 10 for found in (wide, narrow)]
    assert gained == [10 * 10**9 // (10_000 * 131_072), 10 * 10**9 // (10_000 * 65_536)]
