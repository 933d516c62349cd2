"""The order of event batches, without sockets: by cases, and against a brute-force engine that loses and restarts."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv import event_sequence as module
from kvroute.kv.event_sequence import ATTEMPTS, EventSequence, Position, digest_of
from tests.kv.sinks import Log


def batches(life, first, last):
    return [(seq, f"{life}{seq}") for seq in range(first, last + 1)]


def begin(position=None, *, can_replay=True, connected=True):
    log = Log()
    sequence = EventSequence(log, can_replay=can_replay, position=position)
    if connected:
        sequence.connected()
    return sequence, log


def at(life, seq):
    return Position(seq, digest_of(f"{life}{seq}".encode()))


def live(sequence, life, *numbers):
    for seq in numbers:
        sequence.live(seq, f"{life}{seq}".encode())


def answered(sequence, is_complete):
    """End the replay under way, and have handed on what was held back."""
    sequence.answered(is_complete=is_complete)
    while sequence.is_behind:
        sequence.step()


def answer(sequence, life, numbers, *, is_complete=True):
    """Answer the replay that is wanted, from an engine that keeps the batches `numbers`."""
    start = sequence.ask()
    for seq in numbers:
        if seq >= start and not sequence.replayed(seq, f"{life}{seq}".encode()):
            return answered(sequence, False)
    return answered(sequence, is_complete)


def test_a_late_joiner_replays_from_zero_and_goes_on_live():
    """What came live meanwhile is handed on once, after the replay."""
    sequence, log = begin()
    assert sequence.wanted == 0
    live(sequence, "a", 2)
    start = sequence.ask()
    live(sequence, "a", 3, 4)
    for seq in range(4):
        assert sequence.replayed(seq, f"a{seq}".encode())
    answered(sequence, True)
    assert (start, log.told, sequence.wanted) == (0, batches("a", 0, 4), None)
    assert sequence.counters.duplicates == 1


def test_what_was_held_back_is_handed_on_step_by_step():
    """Before what comes meanwhile, so that nobody has to take all of it in one go."""
    sequence, log = begin()
    sequence.ask()
    live(sequence, "a", 0, 1)
    sequence.answered(is_complete=True)
    assert (log.told, sequence.is_behind) == ([], True)
    sequence.step()
    live(sequence, "a", 2)
    assert (log.told, sequence.is_behind) == (batches("a", 0, 0), True)
    sequence.step()
    sequence.step()
    live(sequence, "a", 3)
    assert (log.told, sequence.is_behind, sequence.wanted) == (batches("a", 0, 3), False, None)


def test_a_late_joiner_learns_what_the_buffer_no_longer_holds():
    """A replay that starts late is a gap from 0."""
    sequence, log = begin()
    answer(sequence, "a", range(7, 9))
    assert log.told == ["gap 0-6", *batches("a", 7, 8)]


def test_a_hole_is_filled_by_a_replay_from_the_last_number_inclusive():
    """The batch that showed the hole is in the answer, too."""
    sequence, log = begin()
    answer(sequence, "a", [0])
    live(sequence, "a", 1, 4)
    assert sequence.wanted == 1
    answer(sequence, "a", range(5))
    live(sequence, "a", 5)
    assert log.told == batches("a", 0, 5)
    assert sequence.position == at("a", 5)


def test_repeats_are_ignored():
    """A batch that was handed on is not handed on again."""
    sequence, log = begin(can_replay=False)
    live(sequence, "a", 0, 1, 2, 1, 2, 0, 3)
    assert log.told == batches("a", 0, 3)
    assert sequence.counters.duplicates == 3


def test_another_batch_under_the_number_zero_is_a_new_life():
    """An engine that counts from 0 again has forgotten everything."""
    sequence, log = begin(can_replay=False)
    live(sequence, "a", 0, 1, 2)
    live(sequence, "b", 0, 1)
    assert log.told == [*batches("a", 0, 2), "new life", *batches("b", 0, 1)]


@pytest.mark.parametrize("kept", [range(10), range(3, 4), range(3)])
def test_a_restart_is_noticed_wherever_the_new_engine_has_got_to(kept):
    """Past the old number, just there, or not that far: the digest or the missing number tells, and 0 is asked for."""
    sequence, log = begin(at("a", 3))
    assert sequence.wanted == 3
    answer(sequence, "b", kept)
    assert (log.told, sequence.wanted) == (["new life"], 0)
    answer(sequence, "b", kept)
    missing = [f"gap 0-{kept[0] - 1}"] if kept[0] else []
    assert log.told == ["new life", *missing, *batches("b", kept[0], kept[-1])]


def test_a_restarted_engine_that_has_said_nothing_is_a_new_life():
    """An empty answer to a known number, and then to 0."""
    sequence, log = begin(at("a", 3))
    answer(sequence, "b", [])
    answer(sequence, "b", [])
    assert (log.told, sequence.wanted, sequence.position) == (["new life"], None, None)


def test_a_buffer_that_has_moved_on_is_a_gap():
    """Nothing shows that it is the same life, even if no number is missing."""
    for first, told in ((6, "gap 4-5"), (4, "gap 3-3")):
        sequence, log = begin(at("a", 3))
        answer(sequence, "a", range(first, 8))
        assert log.told == [told, *batches("a", first, 7)]


def test_the_same_life_is_confirmed_without_a_word():
    """A reconnection that missed nothing changes nothing."""
    sequence, log = begin(at("a", 3))
    answer(sequence, "a", range(4))
    live(sequence, "a", 4)
    assert log.told == batches("a", 4, 4)


def test_without_replay_a_hole_is_told():
    """And so is a late start."""
    sequence, log = begin(can_replay=False)
    live(sequence, "a", 2, 3, 6)
    assert log.told == ["gap 0-1", *batches("a", 2, 3), "gap 4-5", *batches("a", 6, 6)]


def test_without_replay_a_reconnection_is_told_with_the_next_batch():
    """It may be another engine, even where the numbers fit."""
    sequence, log = begin(at("a", 3), can_replay=False)
    live(sequence, "b", 4, 5)
    assert log.told == ["gap 3-3", *batches("b", 4, 5)]


def test_without_replay_a_used_number_is_a_new_life():
    """The first batches of the new life were missed."""
    sequence, log = begin(at("a", 9), can_replay=False)
    live(sequence, "b", 4)
    assert log.told == ["new life", "gap 0-3", *batches("b", 4, 4)]


def test_a_replay_that_never_answers_is_done_without():
    """After some attempts the hole is told, and nothing that came live meanwhile is lost."""
    sequence, log = begin()
    for _ in range(ATTEMPTS):
        answer(sequence, "a", [], is_complete=False)
    assert sequence.wanted is None
    live(sequence, "a", 0, 1, 4)
    for _ in range(ATTEMPTS):
        answer(sequence, "a", [], is_complete=False)
        live(sequence, "a", *range(5, 6))
    assert log.told == [*batches("a", 0, 1), "gap 2-3", *batches("a", 4, 5)]
    assert sequence.counters.failed_replays == 2


def test_a_replay_that_breaks_off_is_asked_for_again_from_where_it_came_to():
    """As long as each one brings something, there is no end of attempts."""
    sequence, log = begin()
    for end in range(2, 12, 2):
        answer(sequence, "a", range(end), is_complete=False)
    answer(sequence, "a", range(11))
    assert (log.told, sequence.wanted) == (batches("a", 0, 10), None)


def test_a_hole_in_the_replay_is_asked_for_again_and_told_at_last():
    """A server may drop parts of a long answer."""
    sequence, log = begin()
    for _ in range(1 + ATTEMPTS):
        answer(sequence, "a", [0, 1, 5, 6])
    assert (log.told, sequence.wanted) == ([*batches("a", 0, 1), "gap 2-4", *batches("a", 5, 6)], None)


def test_a_reconnection_during_a_replay_starts_it_again():
    """The answer under way may come from the engine before."""
    sequence, log = begin()
    sequence.ask()
    assert sequence.replayed(0, b"a0")
    sequence.connected()
    assert sequence.is_answer_useless
    assert not sequence.replayed(1, b"a1")
    answered(sequence, False)
    answer(sequence, "b", range(2))
    answer(sequence, "b", range(2))
    assert log.told == [*batches("a", 0, 0), "new life", *batches("b", 0, 1)]


def test_batches_of_the_old_life_that_come_late_are_not_believed():
    """They were read before the replay was asked for, and its answer does not hold them."""
    sequence, log = begin(at("a", 3))
    live(sequence, "a", 4, 5)
    for _ in range(2):
        answer(sequence, "b", range(2))
    live(sequence, "b", 2)
    assert log.told == ["new life", *batches("b", 0, 2)]


def test_what_is_held_back_is_bounded_and_asked_for_again(monkeypatch):
    """Live batches beyond the bound are dropped, and the next replay brings them."""
    monkeypatch.setattr(module, "HELD_LIMIT", 3)
    sequence, log = begin()
    sequence.ask()
    live(sequence, "a", *range(8))
    sequence.replayed(0, b"a0")
    answered(sequence, True)
    assert sequence.wanted == 0
    answer(sequence, "a", range(8))
    assert (log.told, sequence.wanted) == (batches("a", 0, 7), None)
    assert sequence.counters.overflows == 2


def test_what_is_held_back_after_an_overflow_came_after_the_question(monkeypatch):
    """It is handed on, although as many that had come before it were stale."""
    monkeypatch.setattr(module, "HELD_LIMIT", 3)
    sequence, log = begin()
    live(sequence, "a", 2, 3)
    sequence.ask()
    live(sequence, "a", 4, 5, 6)
    for seq in range(5):
        sequence.replayed(seq, f"a{seq}".encode())
    answered(sequence, True)
    assert (log.told, sequence.wanted) == (batches("a", 0, 6), None)


@pytest.mark.parametrize("relief", [lambda sequence: answer(sequence, "a", [3]), EventSequence.connected])
def test_failures_are_counted_in_a_row(relief):
    """An answer, or a new connection, begins the count again."""
    sequence, _ = begin(at("a", 3))
    for _ in range(2):
        for _ in range(ATTEMPTS - 1):
            answer(sequence, "a", [], is_complete=False)
        assert sequence.wanted == 3
        relief(sequence)
        sequence.check()
    assert sequence.counters.failed_replays == 0


def test_a_lost_batch_that_comes_after_all_is_no_new_life():
    """Nothing is known of a number that was told to be lost."""
    sequence, log = begin(at("a", 3))
    answer(sequence, "a", [6, 7])
    live(sequence, "a", 5)
    answer(sequence, "a", [6, 7])
    assert log.told == ["gap 4-5", *batches("a", 6, 7)]


def test_bytes_held_back_are_bounded(monkeypatch):
    """A few giants count like many dwarfs."""
    monkeypatch.setattr(module, "HELD_BYTES", 5)
    sequence, log = begin()
    sequence.ask()
    live(sequence, "a", 0, 1, 2)
    answered(sequence, True)
    answer(sequence, "a", range(3))
    assert (log.told, sequence.counters.overflows) == (batches("a", 0, 2), 1)


@pytest.mark.parametrize("can_replay", [True, False])
def test_batches_around_a_reconnection_are_of_either_life(can_replay):
    """A new engine's batch that happens to bear the next number is not taken for the old one's."""
    sequence, log = begin(can_replay=can_replay)
    if can_replay:
        answer(sequence, "a", range(2))
    live(sequence, "a", 0, 1)
    if can_replay:
        sequence.connected()
    live(sequence, "b", 2)
    if not can_replay:
        sequence.connected()
    if can_replay:
        for _ in range(2):
            answer(sequence, "b", range(4))
        assert log.told == [*batches("a", 0, 1), "new life", *batches("b", 0, 3)]
    else:
        live(sequence, "b", 3)
        assert log.told == [*batches("a", 0, 1), *batches("b", 2, 2), "gap 2-2", *batches("b", 3, 3)]


def test_an_old_number_that_nobody_remembers_is_asked_about():
    """It may be a late repeat, or a new life: the replay tells."""
    for life, told in (("a", []), ("b", ["new life", *batches("b", 0, 4)])):
        sequence, log = begin(at("a", 9))
        answer(sequence, "a", range(10))
        live(sequence, life, 4)
        assert (sequence.wanted, log.told) == (9, [])
        kept = range(10) if life == "a" else range(5)
        while sequence.wanted is not None:
            answer(sequence, life, kept)
        assert log.told == told


def test_going_back_hands_on_again():
    """What was lost further on is taken once more, from the position that was kept."""
    sequence, log = begin()
    answer(sequence, "a", range(5))
    sequence.rewind(at("a", 1))
    answer(sequence, "a", range(5))
    assert log.told == [*batches("a", 0, 4), *batches("a", 2, 4)]


def test_a_batch_that_was_not_taken_in_is_lost():
    """The sink failed on it, perhaps half way: it is told as a gap, and what follows is asked for and handed on."""
    sequence, log = begin()
    log.batch = lambda seq, payload: log.told.append((seq, payload.decode())) if seq % 4 != 1 else 1 / 0
    sequence.ask()
    with pytest.raises(ZeroDivisionError):
        [sequence.replayed(seq, f"a{seq}".encode()) for seq in range(4)]
    answered(sequence, False)
    answer(sequence, "a", range(4))
    with pytest.raises(ZeroDivisionError):
        live(sequence, "a", 4, 5, 6)
    live(sequence, "a", 6)
    assert log.told == [(0, "a0"), "gap 1-1", *batches("a", 2, 4), "gap 5-5", (6, "a6")]
    assert (sequence.counters.gaps, sequence.counters.delivered) == (2, 5)


class Engine:
    """A publisher that numbers, keeps and restarts, and a network that loses what it is told to lose."""

    def __init__(self, kept):
        self.kept = kept  # batches for replay; 0: it answers no replay
        self.stamps = count()
        self.wire = []  # sent, not read yet
        self.restart()

    def restart(self):
        self.sent = []

    def publish(self, is_lost):
        batch = (len(self.sent), f"t{next(self.stamps)}".encode())
        self.sent.append(batch)
        if not is_lost:
            self.wire.append(batch)

    def replay(self, start):
        return [batch for batch in self.sent[-self.kept :] if batch[0] >= start]


class Believer:
    """A sink that keeps what it may believe: everything since the last new life or gap."""

    def __init__(self):
        self.base, self.taken, self.gaps = 0, [], 0

    def batch(self, seq, payload):
        assert seq == self.base + len(self.taken), "out of order"
        self.taken.append((seq, payload))

    def new_life(self):
        self.base, self.taken = 0, []

    def gap(self, first, last):
        assert first <= last
        self.base, self.taken, self.gaps = last + 1, [], self.gaps + 1


def settle(sequence, engine):
    """Read the wire and answer whatever is asked, until nothing is open."""
    for _ in range(50):
        for seq, payload in engine.wire:
            sequence.live(seq, payload)
        engine.wire = []
        while sequence.is_behind:
            sequence.step()
        if sequence.wanted is None:
            return
        replay_once(sequence, engine, cut=None, hole=None, meanwhile=0)
    raise AssertionError("it never stops asking")


def replay_once(sequence, engine, cut, hole, meanwhile):
    """Ask, and answer: `cut` short, with a `hole`, or neither; so many batches are published and heard meanwhile."""
    start = sequence.ask()
    for _ in range(meanwhile // 2):
        engine.publish(False)
    batches = engine.replay(start)
    for _ in range(meanwhile - meanwhile // 2):
        engine.publish(False)
    if meanwhile:
        for seq, payload in engine.wire:
            sequence.live(seq, payload)
        engine.wire = []
    for number, (seq, payload) in enumerate(batches[:cut]):
        if number != hole and not sequence.replayed(seq, payload):
            return sequence.answered(is_complete=False)
    return sequence.answered(is_complete=cut is None)


ACTS = st.one_of(
    st.tuples(st.just("publish"), st.booleans()),
    st.tuples(st.just("read"), st.integers(1, 6)),
    st.tuples(
        st.just("replay"),
        st.one_of(st.none(), st.integers(0, 4)),
        st.one_of(st.none(), st.integers(0, 4)),
        st.integers(0, 3),
    ),
    st.tuples(st.just("reconnect"), st.booleans()),
    st.tuples(st.just("restart"), st.integers(0, 6)),
)


def act(sequence, engine, kind, *details):
    if kind == "publish":
        engine.publish(*details)
    elif kind == "read":
        for _ in range(details[0]):
            if sequence.is_behind:
                sequence.step()
        for seq, payload in engine.wire[: details[0]]:
            sequence.live(seq, payload)
        del engine.wire[: details[0]]
    elif kind == "replay" and sequence.wanted is not None:
        replay_once(sequence, engine, *details)
    elif kind == "reconnect":
        engine.wire = [] if details[0] else engine.wire  # with or without what had arrived
        reconnect(sequence, engine)
    elif kind == "restart":
        engine.restart()
        for number in range(details[0]):
            engine.publish(number < details[0] - 1)  # before the new connection, but for the last one
        reconnect(sequence, engine)


def reconnect(sequence, engine):
    if engine.kept:
        sequence.connected()
    for seq, payload in engine.wire:
        sequence.live(seq, payload)
    engine.wire = []
    if not engine.kept:
        sequence.connected()


@settings(max_examples=400, deadline=None)
@given(kept=st.sampled_from([1, 3, 1000]), acts=st.lists(ACTS, max_size=40))
def test_whatever_happens_what_is_believed_at_rest_is_the_present_life(kept, acts):
    """After losses, restarts, reconnections, broken and holed replays: believed batches are the engine's own, all of
    them from the last gap on; and with a buffer that holds everything there is no gap but one that the replay had."""
    engine, sink = Engine(kept), Believer()
    sequence = EventSequence(sink, can_replay=True)
    sequence.connected()
    for what in acts:
        act(sequence, engine, *what)
    sequence.connected()
    settle(sequence, engine)
    assert sink.taken == engine.sent[sink.base :]
    assert sink.base + len(sink.taken) == len(engine.sent)
    broken = any(what[0] == "replay" and what[1:3] != (None, None) for what in acts)
    if kept == 1000 and not broken:
        assert sink.base == sink.gaps == 0


@settings(max_examples=200, deadline=None)
@given(acts=st.lists(ACTS.filter(lambda what: what[0] != "replay"), max_size=40))
def test_without_replay_what_is_believed_is_never_of_another_life(acts):
    """Until a batch has come after a restart the belief is stale, and nothing can tell; afterwards it is not."""
    engine, sink = Engine(0), Believer()
    sequence = EventSequence(sink, can_replay=False)
    sequence.connected()
    for what in acts:
        act(sequence, engine, *what)
    engine.publish(False)
    settle(sequence, engine)
    assert sink.taken == engine.sent[sink.base :]
