"""Starts of texts are found again, and only where they are the same."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.known_texts import SHORTEST_BYTES, KnownTexts, chain_from, whole_blocks
from kvroute.kv.chain import Root, chain_of, tokens_of

ANCHOR = "<|turn|>"
LIMIT = 1 << 20
ROOT, BLOCK = Root(7), 4
LONG = "x" * SHORTEST_BYTES


def ids_of(text):
    return tokens_of(list(text))  # one token a byte: enough to see what belongs to what


def remember(known, text, at=0):
    """Do what a reader does with a text: note its cuts."""
    for cut in known.cuts(text, at):
        ids = ids_of(text[:cut])
        known.add(text, cut, ids, (BLOCK, ROOT), whole_blocks(chain_of(ids, BLOCK, ROOT), ids, BLOCK))


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
    at, start = known.find(text)
    assert start.ids == ids_of(text[:at])
    assert chain_from(start, ids_of(text), BLOCK, ROOT) == chain_of(ids_of(text), BLOCK, ROOT)
    assert chain_from(start, ids_of(text), BLOCK, Root(8)) == chain_of(ids_of(text), BLOCK, Root(8))


def test_a_grown_conversation_costs_only_its_new_turn():
    """The start of a conversation up to its last anchor is found when more turns follow."""
    known = KnownTexts(ANCHOR, LIMIT)
    before, after = conversation(LONG, "q", ""), conversation(LONG, "q", "answer", "q2", "")
    remember(known, before)
    assert known.find(after)[0] == len(before) - len(ANCHOR)
    assert (known.hits, known.misses) == (1, 0)


def test_another_conversation_shares_the_first_message():
    """The end of the first message is remembered too, because products begin all conversations alike."""
    known = KnownTexts(ANCHOR, LIMIT)
    remember(known, conversation(LONG, "one", "a", "b"))
    assert known.find(conversation(LONG, "other", "c"))[0] == len(ANCHOR) + len(LONG)


def test_nothing_is_cut_without_an_anchor_and_short_texts_are_not_kept():
    """A tokenizer that may not be cut tokenises whole; remembering a few words costs more than reading them again."""
    for known, text in (
        (KnownTexts(None, LIMIT), conversation(LONG, "q")),
        (KnownTexts(ANCHOR, LIMIT), conversation("a", "q")),
    ):
        remember(known, text)
        assert (known.find(text)[0], known.used_bytes) == (0, 0)


def test_memory_is_bounded():
    """Any number of conversations stays within the limit, with many roots as well."""
    known = KnownTexts(ANCHOR, 100_000)
    for number in range(300):
        text = conversation(LONG, str(number), "")
        remember(known, text)
        ids = ids_of(text[: -len(ANCHOR)])
        known.add(text, len(text) - len(ANCHOR), ids, (BLOCK, Root(number)), chain_of(ids, BLOCK, Root(number)))
        assert known.used_bytes <= 100_000
