"""Suspects are found by what they hold, and grow old in deliveries."""

from __future__ import annotations

from kvroute.kv.suspects import Suspects


def test_suspects_are_found_by_their_hash():
    """Several blocks may hold one content; one without a name is only a number."""
    suspects = Suspects()
    for block, own in ((1, 7), (2, 7), (3, None)):
        suspects.add(block, own)
    assert (suspects.named(7), suspects.named(8), list(suspects), 3 in suspects) == ([1, 2], [], [1, 2, 3], True)
    suspects.remove(1, 7)
    suspects.remove(3, 9)
    assert (suspects.named(7), len(suspects)) == ([2], 1)
    suspects.remove(2, 7)
    assert (suspects.named(7), len(suspects)) == ([], 0)


def test_who_is_not_vouched_for_grows_old():
    """The oldest is overdue when so many deliveries have passed since it was last vouched for."""
    suspects = Suspects()
    suspects.add(1, 7)
    suspects.deliveries = 3
    suspects.add(2, 8)
    assert (suspects.overdue(4), suspects.overdue(3)) == (None, 1)
    suspects.add(1, 7)
    suspects.deliveries = 6
    assert (list(suspects), suspects.overdue(3), suspects.named(7)) == ([2, 1], 2, [1])
    assert Suspects().overdue(0) is None
