"""Step times from a table: what was measured comes out, what lies between is interpolated, sums are exact."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.errors import ConfigError
from kvroute.sim.engine import FS, StepWork, seconds
from kvroute.sim.measured import MeasuredTime, rows_of

TABLE = [
    {"kind": "decode", "count": "1", "context": "1000", "seconds": "0.010"},
    {"kind": "decode", "count": 1, "context": 9000, "seconds": 0.018},
    {"kind": "decode", "count": 11, "context": 1000, "seconds": 0.020},
    {"kind": "decode", "count": 11, "context": 9000, "seconds": 0.108},
    {"kind": "prefill", "count": 100, "context": 0, "seconds": 0.02},
    {"kind": "prefill", "count": 1100, "context": 0, "seconds": 0.12},
    {"kind": "prefill", "count": 1100, "context": 4000, "seconds": 0.16},
]


def measured(table=TABLE) -> MeasuredTime:
    return MeasuredTime(rows_of(table))


def decode_s(sequences: int, context: int) -> float:
    return seconds(measured().decode_fs(1, sequences, sequences * context))


@pytest.mark.parametrize("row", TABLE[:4])
def test_a_measured_decode_step_takes_what_was_measured(row):
    """At the table's points its own times come out."""
    assert decode_s(int(row["count"]), int(row["context"])) == pytest.approx(float(row["seconds"]))


def test_times_between_rows_are_interpolated():
    """Half way between contexts, and half way between counts, the time is half way too."""
    assert decode_s(1, 5000) == pytest.approx(0.014)
    assert decode_s(6, 1000) == pytest.approx(0.015)
    assert decode_s(6, 5000) == pytest.approx((0.014 + 0.064) / 2)


def test_times_beyond_the_table_go_on_as_they_ended():
    """The last slope continues, over contexts and over counts; fewer than the least count take its time."""
    assert decode_s(1, 17_000) == pytest.approx(0.026)
    assert decode_s(21, 1000) == pytest.approx(0.030)
    assert seconds(measured().step_fs(StepWork(prefills=((0, 10),)))) == pytest.approx(0.02)


def test_prefills_follow_tokens_and_what_is_cached_before_them():
    """A chunk's time depends on its length and on what it attends to; two chunks cost as one with as many pairs."""
    time = measured()
    assert seconds(time.step_fs(StepWork(prefills=((0, 600),)))) == pytest.approx(0.07)
    assert seconds(time.step_fs(StepWork(prefills=((2000, 1100),)))) == pytest.approx(0.14)
    assert time.step_fs(StepWork(prefills=((2825, 1100),))) == time.step_fs(
        StepWork(prefills=((3100, 550), (3100, 550)))
    )


def test_a_step_that_does_both_pays_for_the_weights_once():
    """Decoding beside a prefill adds its tokens to the prefill's, and the reading of its history."""
    both = measured().step_fs(StepWork(prefills=((0, 589),), decodes=11, kv_tokens=11 * 9000))
    assert seconds(both) == pytest.approx(0.07 + 0.108 - 0.009)


@given(st.integers(1, 60), st.integers(1, 30), st.integers(0, 300_000))
def test_many_steps_take_exactly_the_sum_of_single_ones(steps, sequences, kv_tokens):
    """The closed form is the sum, to the last digit, across the table's points."""
    time = measured()
    work = (StepWork(decodes=sequences, kv_tokens=kv_tokens + step * sequences) for step in range(steps))
    assert time.decode_fs(steps, sequences, kv_tokens) == sum(map(time.step_fs, work))


@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 90))
def test_no_step_takes_no_time_even_where_the_table_falls(steps, sequences, kv_tokens):
    """A table that falls steeply never leads to steps of zero or negative time, and sums stay exact."""
    falling = [{"kind": "decode", "count": 1, "context": n * 10, "seconds": 1e-9 * (5 - n)} for n in range(5)]
    time = measured([*falling, TABLE[-1]])
    singly = [time.decode_fs(1, sequences, kv_tokens + step * sequences) for step in range(steps)]
    assert min(singly) >= 1
    assert time.decode_fs(steps, sequences, kv_tokens) == sum(singly)


def test_an_empty_step_takes_no_time():
    """Where nothing is computed nothing was measured."""
    assert measured().step_fs(StepWork()) == 0


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"kind": "train"}, "row 1: kind must be decode or prefill"),
        ({"count": "0"}, "row 1: count must be a number from 1"),
        ({"count": "1.5"}, "row 1: count"),
        ({"context": "x"}, "row 1: context"),
        ({"seconds": "-1"}, "row 1: seconds"),
        ({"seconds": None}, "row 1: seconds is missing"),
    ],
)
def test_a_wrong_row_is_named(change, said):
    """The error says which row and which column is wrong."""
    with pytest.raises(ConfigError, match=said):
        rows_of([TABLE[0] | change])


@pytest.mark.parametrize("kind", ["decode", "prefill"])
def test_both_kinds_of_steps_must_be_measured(kind):
    """Without rows of one kind there is nothing to interpolate."""
    with pytest.raises(ConfigError, match=f"no row of kind {kind}"):
        measured([row for row in TABLE if row["kind"] != kind])


def test_a_second_is_a_second():
    """Femtoseconds are the unit throughout."""
    one = [{"kind": kind, "count": 1, "context": 0, "seconds": 1} for kind in ("decode", "prefill")]
    assert measured(one).decode_fs(3, 1, 5) == 3 * FS
