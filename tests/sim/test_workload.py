"""What clients send: scripts, stories and the ways to pace them."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.kv.chain import HASH_BYTES, PrefixChain
from kvroute.sim.workload import (
    Script,
    Story,
    Turn,
    jittered,
    limited,
    opened,
    paced,
    padded,
    prompt_chain,
    restarted,
    think_of,
)

PIECES = st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 50)), min_size=1, max_size=6)


def story(pieces, block_size):
    told = Story(block_size)
    for key, tokens in pieces:
        told.tell(key, tokens)
    return told


def letters(pieces):
    """Spell a story: one symbol a token, different wherever the text or its place in the piece differs."""
    return [(at, key, n) for at, (key, tokens) in enumerate(pieces) for n in range(tokens)]


def turns(*think_s, tokens=10):
    return iter([Turn(PrefixChain(b""), tokens, 5, think) for think in think_s])


def starts(workload):
    return [script.start_s for script in workload]


@given(PIECES, PIECES, st.integers(1, 20))
def test_stories_share_the_blocks_of_their_common_beginning(one, other, block_size):
    """Blocks have equal names exactly as long as all tokens up to their ends are equal."""
    first, second = story(one, block_size), story(other, block_size)
    spelled, also = letters(one), letters(other)
    same = next(
        (n for n, (a, b) in enumerate(zip(spelled, also, strict=False)) if a != b), min(map(len, (spelled, also)))
    )
    names = [told.chain[n : n + HASH_BYTES] for told in (first, second) for n in range(0, len(told.chain), HASH_BYTES)]
    blocks = len(first.chain) // HASH_BYTES
    common = next((n for n, (a, b) in enumerate(zip(names[:blocks], names[blocks:], strict=False)) if a != b), None)
    assert blocks == len(spelled) // block_size
    assert common in (None, same // block_size)
    assert (common is None) == (same // block_size == min(blocks, len(names) - blocks))


def test_a_question_goes_on_with_its_answer():
    """The next turn begins with the last one's prompt and answer, and a fork leaves the original alone."""
    told = Story(4).tell("system", 10)
    other = told.fork().tell("else", 8)
    first = told.ask("answer", 6)
    second = told.tell("question", 9).ask("answer 2", 4)
    assert (first.prompt_tokens, second.prompt_tokens) == (10, 25)
    assert second.chain.startswith(first.chain)
    assert len(prompt_chain(first, 4)) == 2 * HASH_BYTES
    assert other.chain[: 2 * HASH_BYTES] == first.chain[: 2 * HASH_BYTES] != other.chain[2 * HASH_BYTES :]


def test_blocks_without_names_get_some_of_their_own():
    """A chain is padded up to its tokens, differently for every number, and never cut short of them."""
    one, other = padded(b"", 33, 16, 5), padded(b"", 33, 16, 900)
    assert (len(one), len(other), one == other) == (2 * HASH_BYTES, 2 * HASH_BYTES, False)
    assert padded(b"x" * 24, 33, 16, 5) == b"x" * 16


def test_an_open_loop_sends_later_turns_at_their_times():
    """Requests come in the order of time, each after the nominal answer before it and the pause."""
    talk = [Script(0.0, turns(0, 10, 1)), Script(5.0, turns(0))]
    assert starts(opened(iter(talk), lambda turn: 2.0)) == [0.0, 5.0, 12.0, 15.0]


def test_jitter_spreads_a_step_and_keeps_the_order_of_time():
    """Ten requests stamped together arrive within the step, at ten times, in order."""
    found = starts(jittered(iter([Script(at, turns(0)) for at in [0.0] * 10 + [3.0] * 10]), 3.0, Random(1)))
    assert found == sorted(found)
    assert len(set(found)) == 20
    assert max(found[:10]) < 3.0 <= found[10] < max(found) < 6.0


def test_a_rate_brings_everything_closer_together():
    """Twice the rate is half the time; no rate is refused by name."""
    assert starts(paced(iter([Script(4.0, turns(0))]), 2.0)) == [2.0]
    with pytest.raises(ConfigError, match="--rate"):
        next(paced(iter([]), 0))


def test_a_limit_counts_requests_and_scripts():
    """Nothing starts after the last request that may be sent, and a conversation stops there."""
    workload = [Script(float(n), turns(0, 1)) for n in range(4)]
    played = [(script.start_s, list(script.turns)) for script in limited(iter(workload), requests=3)]
    assert [(at, len(sent)) for at, sent in played] == [(0.0, 2), (1.0, 1)]
    assert len(list(limited(iter([Script(0.0, turns(0))] * 4), scripts=2))) == 2


def test_new_starts_are_a_poisson_process():
    """Starts keep their order, and their gaps have the stated mean."""
    found = starts(restarted(iter([Script(0.0, turns(0))] * 4000), 2.0, Random(3)))
    assert found == sorted(found)
    assert found[-1] / len(found) == pytest.approx(0.5, rel=0.05)


@pytest.mark.parametrize(
    ("text", "mean"), [("none", 0.0), ("4", 4.0), ("exp:4", 4.0), ("recorded", 7.0), ("exp:0", 0.0)]
)
def test_think_times_are_as_asked_for(text, mean):
    """Pauses are none, fixed, drawn from an exponential distribution, or those of the trace."""
    workload = think_of(text).applied(iter([Script(0.0, turns(*[7.0] * 2000))]), Random(1))
    pauses = [turn.think_s for script in workload for turn in script.turns]
    assert sum(pauses) / len(pauses) == pytest.approx(mean, rel=0.1)
    assert (len(set(pauses)) > 1) == (text == "exp:4")


@pytest.mark.parametrize("text", ["", "soon", "-1", "exp:", "gamma:3", "nan"])
def test_other_think_times_are_refused(text):
    """The error names the option and its forms."""
    with pytest.raises(ConfigError, match="--think"):
        think_of(text)


def test_how_long_clients_think_does_not_depend_on_who_asks_first():
    """A conversation's pauses are its own, whatever the order in which conversations are continued."""

    def played(order):
        scripts = list(think_of("exp:5").applied(iter([Script(0.0, turns(0, 0)), Script(0.0, turns(0, 0))]), Random(2)))
        return {n: next(scripts[n].turns).think_s for n in order}

    assert played([0, 1]) == played([1, 0])
