"""Starts of texts are found again, and only where they are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.known_texts import EMPTY, SHORTEST_BYTES, KnownTexts
from kvroute.kv.chain import Root, chain_of, grow, tokens_of

ANCHOR = "<|turn|>"
LIMIT = 1 << 20
ROOT, BLOCK = Root(7), 4
KEY = (BLOCK, ROOT)
LONG = "x" * SHORTEST_BYTES


def ids_of(text):
    return tokens_of(list(text))  # one token a byte: enough to see what belongs to what


def grown(text, root=ROOT):
    return grow(EMPTY, ids_of(text), BLOCK, root)


def remember(known, text, at=0, root=ROOT):
    """Do what a reader does with a text: note its cuts."""
    for cut in known.cuts(text, at):
        known.add(text, cut, (BLOCK, root), grown(text[:cut], root))


def conversation(*turns):
    return "".join(f"{ANCHOR}{turn}" for turn in turns).encode()


turns = st.lists(st.sampled_from([LONG, "a", "b", "é", ""]), max_size=6)


@given(st.lists(turns, max_size=8), turns)
def test_a_known_start_is_a_start_of_the_text(earlier, turns):
    """Whatever was read before: what is found is a prefix of this text, with this prefix's own ids and chain."""
    known = KnownTexts(ANCHOR, LIMIT)
    for before in earlier:
        remember(known, conversation(*before))
    text = conversation(*turns)
    at, start = known.find(text, KEY)
    assert start == grown(text[:at])
    assert grow(start, ids_of(text[at:]), BLOCK, ROOT).chain == chain_of(ids_of(text), BLOCK, ROOT)


def test_another_root_or_block_size_is_another_start():
    """What was remembered for one chain is not found for another: their hashes differ."""
    known = KnownTexts(ANCHOR, LIMIT)
    text = conversation(LONG, "q", "")
    remember(known, text)
    assert known.find(text, KEY)[0] > 0
    assert known.find(text, (BLOCK, Root(8))) == (0, EMPTY)
    assert known.find(text, (BLOCK * 2, ROOT)) == (0, EMPTY)


def test_a_grown_conversation_costs_only_its_new_turn():
    """The start of a conversation up to its last anchor is found when more turns follow."""
    known = KnownTexts(ANCHOR, LIMIT)
    before, after = conversation(LONG, "q", ""), conversation(LONG, "q", "answer", "q2", "")
    remember(known, before)
    assert known.find(after, KEY)[0] == len(before) - len(ANCHOR)
    assert (known.hits, known.misses) == (1, 0)


def test_another_conversation_shares_the_first_message():
    """The end of the first message is remembered too, because products begin all conversations alike."""
    known = KnownTexts(ANCHOR, LIMIT)
    remember(known, conversation(LONG, "one", "a", "b"))
    assert known.find(conversation(LONG, "other", "c"), KEY)[0] == len(ANCHOR) + len(LONG)


def test_nothing_is_cut_without_an_anchor_and_short_texts_are_not_kept():
    """A tokenizer that may not be cut tokenises whole; remembering a few words costs more than reading them again."""
    for known, text in (
        (KnownTexts(None, LIMIT), conversation(LONG, "q")),
        (KnownTexts(ANCHOR, LIMIT), conversation("a", "q")),
    ):
        remember(known, text)
        assert (known.find(text, KEY)[0], known.used_bytes) == (0, 0)


def test_memory_is_bounded():
    """Any number of conversations stays within the limit, with many roots as well."""
    known = KnownTexts(ANCHOR, 100_000)
    for number in range(300):
        text = conversation(LONG, str(number), "")
        remember(known, text)
        remember(known, text, root=Root(number))
        assert known.used_bytes <= 100_000
