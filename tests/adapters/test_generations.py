"""A map with a bound in bytes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.adapters.generations import Generations

steps = st.lists(st.tuples(st.sampled_from("pg"), st.integers(0, 20), st.integers(0, 60)), max_size=200)


@given(steps)
def test_the_budget_holds_and_values_are_never_mixed_up(steps):
    """Whatever is stored and read: entries weigh no more than the limit, and a value found is the last one stored."""
    entries: Generations[int, int] = Generations(100)
    stored: dict[int, int] = {}
    for number, (step, key, weight) in enumerate(steps):
        if step == "p":
            entries.put(key, number, weight)
            if weight <= 50:
                stored[key] = number
        else:
            assert entries.get(key) in (stored.get(key), None)
        assert entries.used_bytes <= 100


def test_what_is_used_stays_and_what_is_not_used_goes():
    """An entry that is read in every generation outlives any number of others."""
    entries: Generations[str, int] = Generations(100)
    entries.put("used", 1, 10)
    entries.put("unused", 2, 10)
    for number in range(50):
        assert entries.get("used") == 1
        entries.put(f"other {number}", number, 10)
    assert "unused" not in entries


def test_one_entry_cannot_push_out_all_others():
    """An entry heavier than a generation is not kept."""
    entries: Generations[str, int] = Generations(100)
    entries.put("small", 1, 10)
    entries.put("huge", 2, 51)
    assert (entries.get("small"), entries.get("huge"), len(entries)) == (1, None, 1)
