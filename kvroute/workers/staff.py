"""Which worker processes are to be started and stopped, decided from what has happened. It starts none itself.

Rule 1: every slot of the newest generation has one worker. Rule 2: a generation is on trial until all of its workers
serve; only then are the workers of the one before it stopped. Rule 3: where one of a trial ends before it served, the
trial is over and the generation before it goes on. Rule 4: a worker that ends unasked is replaced, the first time at
once, then later and later while its slot does not stay up.

This file knows no process, no socket and no clock: `now_s` is an argument.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import Struct

RETRY_FIRST_S, RETRY_MOST_S = 0.1, 5.0
STEADY_S = 10.0  # a worker that served this long starts a new row of retries


class Post(Struct, frozen=True):
    """A worker's place."""

    id: int  # of the process; never used twice
    slot: int  # 0, 1, ...: the share of the port's connections that it takes
    generation: int  # of the settings; a reload makes a new one


class Orders(Struct, frozen=True):
    """What is to be done now."""

    start: tuple[Post, ...] = ()
    stop: tuple[int, ...] = ()  # ids
    look_again_s: float | None = None  # when a slot may be filled again; None: when something happens


class _Hire(Struct):
    post: Post
    serves: bool = False
    since_s: float = 0.0  # from when it serves
    is_leaving: bool = False


class _Retry(Struct):
    wait_s: float = 0.0
    not_before_s: float = 0.0


class Staff:
    """The workers that there are, and those that there should be.

    `current` is the generation that serves, None before the first one does; `trial` is the one that is to replace it.
    """

    def __init__(self, slots: int) -> None:
        self.current: int | None = None
        self.trial: int | None = 0
        self.restarts = 0  # workers that ended unasked and were replaced
        self._slots = {0: slots}  # of each generation that is of interest
        self._hires: dict[int, _Hire] = {}
        self._retries: dict[int, _Retry] = {}
        self._last_id = self._last_generation = 0

    def reload(self, slots: int) -> int:
        """Put a new generation on trial, instead of one that is still on trial; return its number."""
        self._last_generation += 1
        self.trial = self._last_generation
        self._slots[self.trial] = slots
        self._retries.clear()
        return self.trial

    def dismiss(self) -> None:
        """Want nobody any more: the next step orders everybody to stop."""
        self.current = self.trial = None

    def served(self, id: int, now_s: float) -> None:
        """Note that a worker takes requests."""
        hire = self._hires[id]
        hire.serves, hire.since_s = True, now_s
        trial = self.trial
        if trial is not None and sum(other.serves for other in self._of(trial)) == self._slots[trial]:
            self.current, self.trial = trial, None
            self._slots = {trial: self._slots[trial]}

    def leaves(self, id: int) -> None:
        """Note that a worker takes no requests any more and will end; its place is free."""
        self._hires[id].is_leaving = True

    def ended(self, id: int, now_s: float) -> bool:
        """Note that a worker's process is gone; return whether nobody had asked it to."""
        hire = self._hires.pop(id)
        if hire.is_leaving or hire.post.generation not in (self.current, self.trial):
            return False
        if hire.post.generation == self.trial:
            self.trial = None
            return True
        self.restarts += 1
        retry = self._retries.setdefault(hire.post.slot, _Retry())
        is_steady = hire.serves and now_s - hire.since_s >= STEADY_S
        retry.not_before_s = now_s + (0.0 if is_steady else retry.wait_s)
        retry.wait_s = RETRY_FIRST_S if is_steady else min(max(2 * retry.wait_s, RETRY_FIRST_S), RETRY_MOST_S)
        return True

    def step(self, now_s: float) -> Orders:
        """Return what is to be done; every worker is ordered to start and to stop once."""
        newest = self.current if self.trial is None else self.trial
        stop = tuple(id for id, hire in self._hires.items() if self._is_surplus(hire))
        for id in stop:
            self._hires[id].is_leaving = True
        if newest is None:
            return Orders(stop=stop)
        start, later = [], []
        taken = {hire.post.slot for hire in self._of(newest)}
        for slot in sorted(set(range(self._slots[newest])) - taken):
            not_before_s = self._retries.get(slot, _Retry()).not_before_s
            if not_before_s > now_s:
                later.append(not_before_s)
            else:
                start.append(self._hire(slot, newest))
        return Orders(tuple(start), stop, min(later, default=None))

    def serving(self) -> list[int]:
        """Return the ids of the workers that take requests, the oldest first."""
        return [id for id, hire in self._hires.items() if hire.serves and not hire.is_leaving]

    def _hire(self, slot: int, generation: int) -> Post:
        self._last_id += 1
        post = Post(self._last_id, slot, generation)
        self._hires[post.id] = _Hire(post)
        return post

    def _of(self, generation: int) -> Iterator[_Hire]:
        return (hire for hire in self._hires.values() if hire.post.generation == generation and not hire.is_leaving)

    def _is_surplus(self, hire: _Hire) -> bool:
        return not hire.is_leaving and hire.post.generation not in (self.current, self.trial)
