"""The words that imagined users say."""

from __future__ import annotations

import random

from loadtests import scenarios


def test_a_conversation_keeps_all_that_was_said():
    """Each prompt begins with the whole prompt before it, so that its cache can be used again."""
    conversation = scenarios.Conversation(scenarios.Shape(), random.Random(1))
    first = list(conversation.ask())
    conversation.hear("yes")
    second = conversation.ask()
    assert (second[:2], [m["role"] for m in second]) == (first, ["system", "user", "assistant", "user"])


def test_groups_share_their_system_prompt_word_for_word():
    """Two conversations of one group have equal system prompts; those of other groups differ early."""
    shape = scenarios.Shape(groups=2, system_tokens=200)
    again = scenarios.Shape(groups=2, system_tokens=200)
    assert shape.system_prompt(0) == again.system_prompt(0)
    assert shape.system_prompt(0)[:20] != shape.system_prompt(1)[:20]


def test_the_first_group_is_the_most_popular():
    """Groups are chosen by 1/n, so that prefixes are not all alike in worth."""
    shape, rng = scenarios.Shape(groups=4), random.Random(3)
    picks = [shape.pick_group(rng) for _ in range(2000)]
    assert sorted(range(4), key=picks.count, reverse=True) == [0, 1, 2, 3]


def test_a_seed_repeats_a_run():
    """The same seed says the same words."""
    said = [scenarios.Conversation(scenarios.Shape(), random.Random(5)).ask() for _ in range(2)]
    assert said[0] == said[1]
