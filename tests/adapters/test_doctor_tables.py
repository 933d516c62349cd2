"""Findings as people read them: on 80 columns, without colour where they are piped."""

import io

from rich.console import Console

from kvroute.adapters.doctor_tables import apart, print_findings
from kvroute.routing.findings import Finding

GOOD = Finding("clock", "ok", "clocks agree")
NOTE = Finding("tokens", "note", "are asked of the replica", "a round trip", "--tokenizer DIR")
BAD = Finding(
    "prefix caching", "fail", "is off", "every prompt is computed whole", "vllm serve --enable-prefix-caching"
)


def printed(findings):
    """Print to a pipe."""
    file = io.StringIO()
    print_findings("http://a", findings, Console(file=file, width=80, highlight=False))
    return file.getvalue()


def test_the_worst_comes_first_and_what_is_well_last():
    """Whoever reads only the first line reads the one that matters."""
    lines = [line[:4].strip() for line in printed([GOOD, NOTE, BAD]).splitlines()]
    assert [word for word in lines if word] == ["http", "FAIL", "note", "ok"]


def test_80_columns_and_no_colour_in_a_pipe():
    """Lines wrap at words; there is no escape sequence."""
    text = printed([GOOD, NOTE, BAD])
    assert max(map(len, text.splitlines())) <= 80
    assert "\x1b" not in text


def test_a_line_says_what_it_costs_and_what_mends_it():
    """All three parts are there, marked."""
    text = " ".join(printed([BAD]).split())
    assert "prefix caching: is off. Cost: every prompt is computed whole. Remedy: vllm serve --enable-prefix" in text


def test_a_remedy_that_is_a_question_needs_no_full_stop():
    """One mark is enough."""
    assert "Remedy: is it on?" in printed([Finding("health", "fail", "is gone", "", "is it on?")]).strip()
    assert "?." not in printed([Finding("health", "fail", "is gone", "", "is it on?")])


def test_ranks_that_are_well_say_it_once():
    """A fault names its rank; what is well on every rank is one phrase."""
    ranks = [Finding("capacity", "ok", f"prefix caching on (rank {rank})") for rank in range(8)]
    text = printed([*ranks, Finding("prefix caching", "fail", "is off (rank 8)")])
    assert text.count("prefix caching on") == 1
    assert "is off (rank 8)" in text


def test_brackets_are_no_markup():
    """What a replica said is printed as it is."""
    assert "[red]x[/]" in printed([Finding("models", "fail", "said [red]x[/]")])


def test_what_all_replicas_share_is_said_once():
    """A remark on every replica that answers is taken out of each; what is well stays with its replica."""
    common, own = apart([[GOOD, NOTE], [GOOD, NOTE, BAD], [BAD]])
    assert (common, own) == ([NOTE], [[GOOD], [GOOD, BAD], [BAD]])
    assert apart([[GOOD, NOTE]]) == ([], [[GOOD, NOTE]])
