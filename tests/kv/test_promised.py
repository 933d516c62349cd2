"""What was just sent counts as held, for a short while."""

from __future__ import annotations

from kvroute.kv.chain import PrefixChain, chain_of, root_of, tokens_of
from kvroute.kv.promised import KEPT_MAX, LIFE_S, TELLING_S, Promised


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


def test_what_was_sent_counts_for_a_while():
    """A chain counts for at least half of its life, and after its life no more."""
    promised = Promised(100)
    for start_s in (0.0, 100.0, 100.0 + LIFE_S / 4):
        promised.record(chain(1, 2, 3), start_s)
        assert promised.held(chain(1, 2, 9), start_s + LIFE_S / 2 - 0.01) == 2
    assert promised.held(chain(1, 2, 3), 100.0 + LIFE_S / 4 + LIFE_S) == 0


def test_the_older_half_still_counts():
    """What was sent before the turn is found after it, beside what was sent since."""
    promised = Promised(100)
    promised.record(chain(1, 2, 3), 10.0)
    promised.record(chain(1, 5), 10.0 + LIFE_S / 2)
    assert [promised.held(one, 10.0 + LIFE_S / 2 + 0.1) for one in (chain(1, 2, 3), chain(1, 5))] == [3, 2]


def test_what_was_not_computed_is_taken_back():
    """A request that failed leaves no promise beyond what the replica held before."""
    promised = Promised(100)
    promised.record(chain(1, 2, 3), 0.0)
    promised.take_back(chain(1, 2, 3), 1)
    assert promised.held(chain(1, 2, 3), 0.1) == 1


def test_an_answer_ends_the_promise():
    """Soon after the answer what was computed is the engine's to tell; what others share with it still counts."""
    promised = Promised(100)
    for one in (chain(1, 2, 3), chain(1, 2, 4, 5), chain(7)):
        promised.record(one, 0.0)
    for one in (chain(1, 2, 3), chain(1, 2), chain(1, 2, 4, 9), chain(8)):
        promised.keep(one, 0.0)
    asked = (chain(1, 2, 3), chain(1, 2, 4, 5), chain(7))
    assert [promised.held(one, TELLING_S - 0.1) for one in asked] == [3, 4, 1]
    assert [promised.held(one, TELLING_S + 0.1) for one in asked] == [2, 4, 1]
    promised.keep(chain(1, 2, 4, 5), 1.0)
    assert [promised.held(one, 1.1 + TELLING_S) for one in asked] == [0, 0, 1]


def test_what_was_told_ends_the_promise_at_once():
    """Of what was computed, whatever the engine has told of is its own word from then on; what it has not, and what is
    still under way, stays promised."""
    promised = Promised(100)
    for one in (chain(1, 2), chain(3), chain(4)):
        promised.record(one, 0.0)
    for one in (chain(1, 2), chain(3)):
        promised.keep(one, 0.0)
    promised.settle(lambda one: one in (chain(1, 2), chain(4)))
    assert [promised.held(one, 0.1) for one in (chain(1, 2), chain(3), chain(4))] == [0, 1, 1]


def test_of_a_hybrid_whole_prompts_are_promised():
    """What goes on where a prompt would be found again counts, and nothing that parts from it before."""
    promised = Promised(100)
    promised.record(chain(1, 2, 3, 4), 0.0, 3)
    promised.record(chain(1, 2), 0.0)
    asked = chain(1, 2, 3, 4, 5), chain(1, 2, 3, 9), chain(1, 2, 9), chain(1, 9)
    assert [promised.held(one, 0.1, to_ends=True) for one in asked] == [3, 3, 2, 0]
    promised.take_back(chain(1, 2), 0)
    assert [promised.held(one, 0.1, to_ends=True) for one in asked] == [0, 0, 0, 0]
    promised.record(chain(1, 2, 3), LIFE_S)
    assert promised.held(chain(1, 2, 3), 1.4 * LIFE_S, to_ends=True) == 3
    assert promised.held(chain(1, 2, 3), 3 * LIFE_S, to_ends=True) == 0


def test_what_was_crowded_out_ends_with_the_rest():
    """More is sent than the replica holds: what is left of a chain whose end had to make room ends with its answer."""
    promised = Promised(4)
    for one in (chain(1, 2, 3), chain(7, 8, 9)):
        promised.record(one, 0.0)
    assert promised.held(chain(1, 2, 3), 0.1) == 1
    promised.keep(chain(1, 2, 3), 0.1)
    assert [promised.held(one, 0.2 + TELLING_S) for one in (chain(1, 2, 3), chain(7, 8, 9))] == [0, 3]


def test_too_many_answers_at_once_end_at_once():
    """Answers whose promises are about to end are bounded, too."""
    promised = Promised(2 * KEPT_MAX)
    for token in range(KEPT_MAX + 1):
        promised.record(chain(token), 0.0)
        promised.keep(chain(token), 0.0)
    assert [promised.held(chain(token), 0.1) for token in (0, 1)] == [0, 1]


def test_promises_are_bounded():
    """No more is remembered than the replica can hold."""
    promised = Promised(4)
    for token in range(10):
        promised.record(chain(token, 1), 0.0)
    assert sum(promised.held(chain(token, 1), 0.1) for token in range(10)) == 4


def test_a_promise_ends_in_time_however_late_somebody_asks():
    """A generation that was looked at late is not older for it: nothing counts for longer than its life."""
    promised = Promised(10)
    promised.record(chain(1), 100.0)
    assert promised.held(chain(1), 100.0 + LIFE_S - 0.1) == 1
    assert promised.held(chain(1), 100.0 + LIFE_S + 1.8) == 0
