"""Sizing results on a terminal."""

import io

import pytest
from rich.console import Console

from kvroute.adapters.size_tables import print_headroom, print_report, print_verdict
from kvroute.sizing.assemble import report_of
from kvroute.sizing.capacity import Share
from kvroute.sizing.engine_log import EngineLog
from kvroute.sizing.hardware import gpu
from kvroute.sizing.model import model_of
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.remedies import Usage, headroom
from kvroute.sizing.report import Wishes
from kvroute.sizing.verdict import Verdict


@pytest.fixture
def console():
    """A console of 100 columns that keeps what is printed."""
    return Console(file=io.StringIO(), width=100)


def shown(console):
    """What was printed."""
    return console.file.getvalue()


def test_a_report_shows_machines_side_by_side(console):
    """Conversations of each GPU stand in one row, with those of an FP8 cache in brackets."""
    wishes = Wishes(weights_bytes=16 * 10**9, utilisation=0.9, mix=(Share(1.0, 8_000),), users=50, prefix_tokens=4_000)
    print_report(report_of(preset("llama-3.1-8b"), [gpu("h100"), gpu("h200")], wishes), console)
    row = next(line for line in shown(console).splitlines() if "53 (106)" in line)
    assert "105 (211)" in row
    assert "131,072 (128 KiB)" in shown(console)
    assert "26.21 GB unshared, 0.52 GB shared" in shown(console)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_preset_prints(console, name):
    """No model is without its tables, whether it fits or not."""
    print_report(report_of(preset(name), [gpu("l4"), gpu("h200")], Wishes()), console)
    assert f"{preset(name).name}: " in shown(console)


@pytest.mark.parametrize(
    ("agrees", "words"), [(True, "agrees"), (False, "does not agree"), (None, "cannot be compared")]
)
def test_verdicts(console, agrees, words):
    """Reported, expected, and what was found."""
    log = EngineLog(version="0.33.0", tokens=1_000)
    verdict = Verdict(
        agrees=agrees,
        reported_tokens=1_000,
        expected_tokens=(990, 1_010),
        findings=("a cause",),
        assumed=("a default",),
    )
    print_verdict(log, verdict, console)
    text = shown(console)
    assert "vLLM 0.33.0: 1,000 tokens reported" in text
    assert "990 to 1,010" in text
    assert words in text
    assert "finding: a cause" in text
    assert "assumed: a default" in text


def test_headroom(console):
    """The state and all four remedies."""
    usage = Usage(capacity_tokens=1_000, used_fraction=0.5, running=5, waiting=0, preemptions=0)
    print_headroom(headroom(usage), console)
    text = shown(console)
    assert "room for 500 tokens" in text
    assert all(name in text for name in ("shorter context", "FP8 cache", "more memory", "fewer concurrent requests"))


def test_no_figure_is_cut_off():
    """On 80 columns a wide figure goes on in the next line: every digit of the JSON answer is in the table."""
    tiny = model_of({"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8})
    narrow = Console(file=io.StringIO(), width=80)
    print_report(report_of(tiny, [gpu("h200")], Wishes(weights_bytes=10**6)), narrow)
    assert "\u2026" not in shown(narrow)


def test_each_machines_own_reasons_carry_its_name(console):
    """What differs between machines is said of each, what holds for all of them once."""
    print_report(report_of(preset("gemma-3-27b"), [gpu("h100"), gpu("h200")], Wishes()), console)
    lines = shown(console).splitlines()
    assert sum("ideal: " in line for line in lines) == 2
    assert any(line.startswith("1 x h100: ideal: ") for line in lines)
    assert sum("block 0 is never used" in line for line in lines) == 1
