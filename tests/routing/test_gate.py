"""The gate: no request goes where it would not fit until its end."""

from __future__ import annotations

import pytest

from kvroute.routing import gate
from kvroute.routing.cost import work_of
from kvroute.routing.demand import Promise
from kvroute.routing.fairness import Reserve
from kvroute.routing.gate import Calibration, Gate
from kvroute.routing.member import Member
from kvroute.routing.rates import ModelRates
from kvroute.routing.replica import Load
from tests.routing.builders import ROUND, replica

WORK = work_of(1_000, 200, 50.0)  # 1,250 tokens at its end


def member(requests: int = 1, kv_tokens: int = 0, **fields: int | None) -> Member:
    """Make a replica of 10,000 tokens to which others have promised something."""
    found = Member(replica("r0", **{"capacity_tokens": 10_000, "max_num_seqs": 4, **fields}), 1, ModelRates(ROUND))
    found.set_others(Promise(requests, 0, kv_tokens))
    return found


def test_a_request_needs_room_for_prompt_and_answer():
    """Of 9,500 tokens 8,250 may be promised already, and not one more."""
    assert Gate().is_open(member(1, 8_250), WORK, None, 0.0)
    assert not Gate().is_open(member(1, 8_251), WORK, None, 0.0)


def test_an_idle_replica_takes_what_fits_nowhere_better():
    """A prompt of nearly the whole cache waits for nothing where nothing runs."""
    assert Gate().is_open(member(0, 0), work_of(0, 9_900, 50.0), None, 0.0)


def test_a_full_batch_is_no_place_either():
    """With all four slots taken a request would wait in the engine, where it is bound already."""
    assert Gate().is_open(member(3), WORK, None, 0.0)
    assert not Gate().is_open(member(4), WORK, None, 0.0)


def test_a_replica_that_has_not_told_its_capacity_is_open():
    """Nothing is held because of what is not known."""
    assert Gate().is_open(member(3, 10**9, capacity_tokens=None), WORK, None, 0.0)


def test_preemptions_leave_more_room_and_quiet_takes_it_back():
    """A round with preemptions takes a twentieth; 20 s without give four hundredths back."""
    known = Calibration(0.0)
    known.observe(5, 0.0)
    known.observe(7, 10.0)
    assert known.fill == pytest.approx(0.95 * 0.95)
    known.observe(7, 30.0)
    assert known.fill == pytest.approx(0.95 * 0.95 + 0.04)
    known.observe(7, 1_000.0)
    assert known.fill == gate.FILL
    known.observe(8, 1_000.0)
    known.observe(9, 1_000.0 + gate.ROUND_S / 2)
    assert known.fill == pytest.approx(0.95 * 0.95)
    for count in range(10, 40):
        known.observe(count, 1_000.0 + gate.ROUND_S * count)
    assert known.fill == gate.FILL_MIN


def test_an_engine_that_restarts_has_preempted_nothing():
    """Its count begins at zero again, which is no sign of pressure."""
    known = Calibration(0.0)
    known.observe(100, 0.0)
    known.observe(3, 1.0)
    assert known.fill == gate.FILL


def test_the_gate_reads_the_engines_reports():
    """Preemptions that metrics show close the gate for a promise that fitted before."""
    here, known = member(1, 8_250), Gate()
    assert known.is_open(here, WORK, None, 0.0)
    here.report(Load(preemptions=3, running=1), 1.0)
    assert not known.is_open(here, WORK, None, 1.0)


def test_room_is_left_for_others_that_take_less():
    """Who takes more than a share leaves them room for a request, a slot, and a short way to their first token."""
    others = Reserve()
    others.learn(1_000.0, 2_000.0, 0.4, 5.0)
    for sequences, kv_tokens, pending_tokens, is_open in (
        (1, 7_250, 0, True),
        (1, 7_251, 0, False),
        (3, 0, 0, False),
        (1, 0, 100, True),
        (1, 0, 101, False),
    ):
        here = member(sequences, kv_tokens)
        here.prefill_tokens = pending_tokens
        assert Gate().is_open(here, WORK, None, 0.0, others) == is_open
