"""After events of a hybrid were lost, hits end nowhere but where the engine lets them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.engine_hashes import EngineHashes
from tests.kv.encoded import cleared, removed, stored
from tests.kv.test_engine_hashes import MODEL
from tests.kv.test_hit_ends import STATE, WINDOW, Engine, chain, table, tell
from tests.kv.test_lost_events import again, name

KINDS = {0: {}, 1: WINDOW, 2: STATE}
WINDOWED = stored([1], None, [1], 1, **WINDOW)


def test_ends_go_with_what_was_learnt():
    """What deliveries taught takes along where its hits may end, and is learnt anew with what is delivered then."""
    known = table(stored([9], None, [3], 1), stored([9], None, [3], 1, **WINDOW))
    known.suspect()
    known.delivered(chain(7, 8, 9), 2)
    assert (known.reusable(chain(7, 8)), len(known.ends)) == (2, 2)
    known.delivered(chain(7, 8), 0)
    assert (known.reusable(chain(7, 8)), len(known.ends)) == (0, 0)


@pytest.mark.parametrize("found", [1, 2])
def test_a_hit_that_ends_where_something_was_given_up(found):
    """A delivery may say in one where a hit ended and that what was learnt beyond is gone, and with that what is known
    by the engine's own name too: no place is an end of which nothing is known."""
    known = table(stored([9], None, [3], 1), WINDOWED)
    known.suspect()
    known.delivered(chain(1, 2, 3), 3)
    tell(known, stored([1], None, [1], 1), stored([2], 1, [2], 1))
    known.delivered(chain(1, 2, 3), found)
    known.changes()
    assert (known.held(chain(1, 2, 3)), known._learnt) == (2, set())
    assert known.ends.groups[1].copies == {}


class Hybrid(Engine):
    """Such an engine with a bound on what all its groups keep together."""

    def __init__(self, needs: dict[int, int | None], capacity: int) -> None:
        super().__init__(needs)
        self.capacity, self.kept = capacity, list[tuple[int, tuple[int, ...]]]()

    def serve(self, ids: tuple[int, ...], keeps: list[bool]) -> tuple[int, list]:
        """Return how many blocks a prompt found, and the events of its way; `keeps` says of which blocks a sparse group
        keeps more than it must."""
        found, more = self.hit(ids), iter(keeps)
        every = [(group, ids[:n]) for group in (0, *self.needs) for n in range(1, len(ids) + 1)]
        old = [key for key in every if len(key[1]) <= found and key in self.kept]
        new = [key for key in every if len(key[1]) > found and (not key[0] or key[1] == ids or next(more, False))]
        self.kept = [key for key in self.kept if key not in old]
        events = []
        while self.kept and len(self.kept) + len(old) + len(new) > self.capacity:
            group, gone = self.kept.pop(0)
            self.copies[group, gone] -= 1
            events.append(removed(name(gone), group_idx=group))
        for group in (0, *self.needs):
            names = [name(one) for where, one in new if where == group]
            events.append(stored(names, name(ids[:found]), list(ids[found:]), 1, **KINDS[group]))
        self.copies.update(new)
        self.kept += sorted(old + new, key=lambda key: -len(key[1]))
        return found, events


prompts = st.lists(st.integers(0, 1), min_size=1, max_size=6).map(tuple)
fates = st.sampled_from(["heard"] * 5 + ["lost", "packed", "cleared"])
acts = st.lists(st.tuples(prompts, fates, st.lists(st.booleans(), max_size=8)), max_size=60)


@settings(max_examples=300, deadline=None)
@given(acts, st.sampled_from([{1: 2}, {2: None}, {1: 2, 2: None}]), st.integers(12, 36))
def test_what_is_certain_is_delivered(history, needs, capacity):
    """Whatever is evicted while nobody hears it: where nothing is in doubt, a prompt finds all that is predicted."""
    engine, known, is_lost = Hybrid(needs, capacity), EngineHashes(MODEL, capacity), False
    for ids, fate, keeps in history:
        predicted, is_certain = known.reusable(chain(*ids)), not known.suspects and not is_lost
        if fate == "cleared":
            engine.kept, events = [], [cleared()]
            engine.copies.clear()
            predicted = 0
        found, rest = engine.serve(ids, keeps)
        events = rest if fate != "cleared" else events + rest
        assert predicted <= found or not is_certain
        if fate == "lost":
            is_lost = True
            continue
        if is_lost:
            known.suspect()
            is_lost = False
        tell(known, *events)
        known.delivered(chain(*ids), found)
        if fate == "packed":
            known = again(known)
