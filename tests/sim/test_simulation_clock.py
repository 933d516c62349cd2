"""The heap of due times."""

from __future__ import annotations

from kvroute.sim.simulation_clock import STEPS, Clock, fs_of


def test_what_is_due_happens_in_order():
    """Events come by time; of one moment, ends of steps first, then in the order of scheduling."""
    clock, seen = Clock(), []
    for due, name in ((3, "d"), (1, "b"), (1, "c")):
        clock.at(due, seen.append, name)
    clock.at(1, seen.append, "a", STEPS)
    clock.run()
    assert seen == list("abcd")
    assert clock.now_fs == 3


def test_nothing_happens_in_the_past():
    """What is scheduled for an earlier time happens now."""
    clock, seen = Clock(), []
    clock.at(fs_of(5.0), lambda _: clock.at(0, lambda _: seen.append(clock.now_s)))
    clock.run()
    assert seen == [5.0]
