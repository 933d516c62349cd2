"""Lookups end: answered, failed or late."""

from __future__ import annotations

import asyncio
import time

from kvroute.adapters.redis_lookup import BUSY_S, Deadlines, Lookup


def lookup(calls: int, within_s: float) -> Lookup:
    return Lookup(calls, time.monotonic() + within_s, asyncio.get_running_loop().create_future())


async def test_a_lookup_is_answered_by_its_last_call():
    """Replies may come in any order; each stays in the place of its call."""
    one = lookup(2, 1.0)
    one.answer(1, b"b")
    assert not one.done.done()
    one.answer(0, b"a")
    assert (await one.done, one.replies) == (True, [b"a", b"b"])


async def test_one_error_ends_a_lookup():
    """A call that failed fails the lookup at once, and is not taken for a late one; what comes later is not minded."""
    one = lookup(2, 1.0)
    one.answer(0, ConnectionError())
    one.answer(1, b"b")
    assert (await one.done, one.is_late) == (False, False)


async def test_every_lookup_has_its_own_deadline():
    """One timer ends those whose time is up, and leaves the answered and the later ones alone."""
    deadlines, now_s = Deadlines(), time.monotonic()
    answered, first, second = lookup(1, 0.0), lookup(1, 0.01), lookup(1, 60.0)
    for one in (answered, first, second):
        deadlines.watch(one, now_s)
    answered.answer(0, b"a")
    assert (await answered.done, await first.done) == (True, False)
    assert (answered.is_late, first.is_late, second.done.done()) == (False, True, False)
    deadlines.close()
    assert (await second.done, second.is_late) == (False, True)


async def test_a_busy_loop_is_not_taken_for_a_silent_redis():
    """When the timer itself was held up, what has come meanwhile is read before anything is called late."""
    deadlines, one = Deadlines(), lookup(1, 0.001)
    deadlines.watch(one, time.monotonic())
    asyncio.get_running_loop().call_later(0.002, one.answer, 0, b"a")
    time.sleep(0.005 + 2 * BUSY_S)  # noqa: ASYNC251  # this is what is tested
    assert await one.done
    deadlines.close()


async def test_a_lookup_that_nobody_waits_for_any_more():
    """A lookup whose caller has left needs no answer and is not late."""
    deadlines, left, after = Deadlines(), lookup(1, 0.0), lookup(1, 0.01)
    for one in (left, after):
        deadlines.watch(one, time.monotonic())
    left.done.cancel()
    assert (await after.done, left.is_late) == (False, False)
    left.answer(0, b"a")
    deadlines.close()
