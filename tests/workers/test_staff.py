"""Who is started and stopped, told as a dialogue of what happened and what is ordered."""

from __future__ import annotations

from kvroute.workers.staff import RETRY_FIRST_S, RETRY_MOST_S, STEADY_S, Orders, Post, Staff


def serving(slots: int) -> Staff:
    """Return a staff whose first generation serves since second 0."""
    staff = Staff(slots)
    for post in staff.step(0.0).start:
        staff.served(post.id, 0.0)
    return staff


def test_every_slot_gets_one_worker():
    """The first generation fills its slots and is the current one when all of them serve."""
    staff = Staff(2)
    assert staff.step(0.0) == Orders(start=(Post(1, 0, 0), Post(2, 1, 0)))
    assert staff.step(0.1) == Orders()
    staff.served(1, 0.2)
    assert (staff.current, staff.trial) == (None, 0)
    staff.served(2, 0.3)
    assert (staff.current, staff.trial, staff.serving()) == (0, None, [1, 2])


def test_a_first_worker_that_does_not_come_up_ends_the_start():
    """Where one ends before all serve there is no generation at all, and the others are stopped."""
    staff = Staff(2)
    staff.step(0.0)
    staff.served(1, 0.1)
    assert staff.ended(2, 0.2)
    assert (staff.current, staff.trial) == (None, None)
    assert staff.step(0.2) == Orders(stop=(1,))


def test_a_worker_that_ends_is_replaced_at_once():
    """The slot of a worker that ended is filled again; the others are left alone."""
    staff = serving(2)
    assert staff.ended(1, 1.0)
    assert staff.step(1.0) == Orders(start=(Post(3, 0, 0),))
    assert staff.restarts == 1


def test_one_that_does_not_stay_up_waits_longer_and_longer():
    """Retries are spaced by twice the last wait, up to a bound; whoever served for a while starts anew."""
    staff, now_s, waits = serving(1), 1.0, []
    for id in range(1, 12):
        staff.ended(id, now_s)
        orders = staff.step(now_s)
        if orders.look_again_s is not None:
            assert orders.start == ()
            waits.append(round(orders.look_again_s - now_s, 6))
            now_s = orders.look_again_s
            orders = staff.step(now_s)
        assert [post.slot for post in orders.start] == [0]
    assert waits[:3] == [RETRY_FIRST_S, 2 * RETRY_FIRST_S, 4 * RETRY_FIRST_S]
    assert waits[-1] == RETRY_MOST_S
    staff.served(12, now_s)
    staff.ended(12, now_s + STEADY_S + 1)
    assert staff.step(now_s + STEADY_S + 1).start


def test_reload_stops_the_old_when_all_new_ones_serve():
    """Until the last new worker serves, the old ones go on."""
    staff = serving(2)
    assert staff.reload(2) == 1
    assert staff.step(1.0) == Orders(start=(Post(3, 0, 1), Post(4, 1, 1)))
    staff.served(3, 2.0)
    assert staff.step(2.0) == Orders()
    staff.served(4, 3.0)
    assert staff.step(3.0) == Orders(stop=(1, 2))
    assert staff.serving() == [3, 4]
    assert not staff.ended(1, 4.0)
    assert staff.step(4.0) == Orders()


def test_reload_that_fails_changes_nothing():
    """Where a new worker ends before it served, the other new ones are stopped and the old ones go on."""
    staff = serving(2)
    staff.reload(2)
    staff.step(1.0)
    staff.served(3, 1.5)
    assert staff.ended(4, 2.0)
    assert staff.step(2.0) == Orders(stop=(3,))
    assert (staff.current, staff.trial, staff.serving()) == (0, None, [1, 2])


def test_an_old_worker_that_dies_in_a_trial_is_replaced_if_the_trial_fails():
    """A slot that became empty meanwhile is filled from the generation that goes on."""
    staff = serving(1)
    staff.reload(1)
    staff.step(1.0)
    staff.ended(1, 1.5)
    assert staff.step(1.5) == Orders()
    staff.ended(2, 2.0)
    assert staff.step(2.0) == Orders(start=(Post(3, 0, 0),))


def test_reload_within_a_reload_replaces_the_trial():
    """The newest settings count: the workers of the trial before them are stopped."""
    staff = serving(1)
    staff.reload(1)
    staff.step(1.0)
    staff.reload(1)
    assert staff.step(1.1) == Orders(start=(Post(3, 0, 2),), stop=(2,))
    staff.served(3, 2.0)
    assert staff.step(2.0) == Orders(stop=(1,))


def test_reload_changes_the_number_of_workers():
    """More slots or fewer, as the new settings say."""
    staff = serving(2)
    staff.reload(1)
    (post,) = staff.step(1.0).start
    staff.served(post.id, 2.0)
    assert staff.step(2.0) == Orders(stop=(1, 2))
    staff.reload(3)
    assert [post.slot for post in staff.step(3.0).start] == [0, 1, 2]


def test_all_are_dismissed():
    """At the end everybody is asked to stop, once, and nobody's end is a surprise."""
    staff = serving(2)
    staff.dismiss()
    assert staff.step(1.0) == Orders(stop=(1, 2))
    assert staff.step(1.1) == Orders()
    assert not staff.ended(1, 2.0)
    assert staff.serving() == []


def test_whoever_leaves_by_himself_is_replaced_before_he_is_gone():
    """A worker that somebody asked to end takes no more connections, so its place is free while it finishes."""
    staff = serving(2)
    staff.leaves(1)
    assert staff.step(1.0) == Orders(start=(Post(3, 0, 0),))
    assert not staff.ended(1, 9.0)
    assert staff.step(9.0) == Orders()
