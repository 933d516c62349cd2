"""The tables of `kvroute simulate`."""

from __future__ import annotations

import re

import pytest

from kvroute.cli_simulate_table import print_table
from tests.sim.reports import compared


@pytest.mark.parametrize("width", [60, 80, 300])
def test_a_narrow_terminal_gets_several_tables(monkeypatch, capsys, width):
    """Names of figures are whole, no line is longer than the terminal, and every policy has its column once."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(width))
    print_table(compared())
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    rows = [line for line in lines if line.startswith("│")]
    assert max(map(len, rows)) <= width
    assert [line for line in rows if "first token, p99 " in line]
    heads = [line for line in lines if line.startswith("┃")]
    policies = [row.policy for row in compared().rows]
    assert [sum(f" {policy} " in line for line in heads) for policy in policies] == [1] * len(policies)
    assert (len(heads) > 1) == (width == 60)


def test_names_of_files_are_printed_as_they_are(capsys):
    """Brackets in them are no markup."""
    report = compared()
    odd = type(report)("[red]a[/red].jsonl", {"workload": "[bold]b"}, report.rows, report.notes)
    print_table(odd)
    printed = capsys.readouterr().out
    assert "[red]a[/red].jsonl" in printed
    assert "workload: [bold]b" in printed
