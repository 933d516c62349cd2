"""A diagnosis on a terminal: what is well in one paragraph, everything else in lines of its own, the worst first."""

from __future__ import annotations

import re
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvroute.routing.findings import Finding

STYLES = {"fail": "bold red", "warn": "yellow", "note": "cyan", "ok": "green"}
WORDS = {"fail": "FAIL"}
RANK = re.compile(r" \(rank \d+\)")  # left out of what is well: ranks say the same things


def print_findings(title: str, findings: Sequence[Finding], console: Console) -> None:
    """Print what was found of one replica, of the pool, or of the store."""
    console.print(Text(title, style="bold"), soft_wrap=True)
    table = Table.grid(padding=(0, 1))
    table.add_column(width=4, no_wrap=True)
    table.add_column()
    for level in ("fail", "warn", "note"):
        for finding in findings:
            if finding.level == level:
                table.add_row(Text(WORDS.get(level, level), style=STYLES[level]), _words(finding))
    if well := [RANK.sub("", finding.says) for finding in findings if finding.level == "ok"]:
        table.add_row(Text("ok", style=STYLES["ok"]), Text("; ".join(dict.fromkeys(well))))
    console.print(table)


def apart(replicas: Sequence[Sequence[Finding]]) -> tuple[list[Finding], list[list[Finding]]]:
    """Split what is to be said of every replica that answers from what is each one's own; what is well stays there."""
    answering = [findings for findings in replicas if any(finding.level == "ok" for finding in findings)]
    common = [
        finding
        for finding in (answering[0] if len(answering) > 1 else ())
        if finding.level != "ok" and all(finding in findings for findings in answering)
    ]
    return common, [[finding for finding in findings if finding not in common] for findings in replicas]


def _words(finding: Finding) -> Text:
    text = Text()
    text.append(finding.check, style="bold")
    text.append(f": {finding.says}.")
    if finding.costs:
        text.append(f" Cost: {finding.costs}.")
    if finding.remedy:
        text.append(" Remedy: ", style="bold")
        text.append(finding.remedy if finding.remedy.endswith("?") else f"{finding.remedy}.")
    return text
