"""Turns on the event loop: short, in order, shared."""

from __future__ import annotations

import asyncio

from kvroute.adapters.turns import Turns


class Work:
    """So many pieces, each noted; a turn ends after one."""

    def __init__(self, name, pieces, done):
        self.name, self.pieces, self.done = name, pieces, done

    def __call__(self, until_s):
        self.done.append(self.name)
        self.pieces -= 1
        return self.pieces > 0


async def test_work_is_called_until_there_is_no_more_and_others_run_between():
    """Whoever has more goes to the end of the queue."""
    turns, done = Turns(turn_s=0.0), []
    turns.want(Work("a", 2, done))
    turns.want(Work("b", 1, done))
    for _ in range(5):
        done.append("other")
        await asyncio.sleep(0)
    assert done == ["other", "a", "other", "b", "other", "a", "other", "other"]


async def test_within_one_turn_all_who_wait_are_called():
    """While there is time."""
    turns, done = Turns(turn_s=60.0), []
    works = [Work("a", 3, done), Work("b", 2, done)]
    for work in [*works, works[0]]:
        turns.want(work)
    await asyncio.sleep(0)
    assert done == ["a", "b", "a", "b", "a"]


async def test_work_that_asks_for_a_turn_in_its_turn_is_called_again():
    """As when something arrived meanwhile."""
    turns, done = Turns(turn_s=0.0), []

    def work(until_s):
        done.append("work")
        if len(done) == 1:
            turns.want(work)
        return False

    turns.want(work)
    for _ in range(4):
        await asyncio.sleep(0)
    assert done == ["work", "work"]
