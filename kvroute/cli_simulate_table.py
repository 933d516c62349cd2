"""The tables that `kvroute simulate` prints: as many policies beside each other as the terminal has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvroute.sim.report import Report, Row, best_of, shown, words


def print_table(report: Report) -> None:
    """Print what was simulated, its figures, and what they leave out."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    for name, fact in report.facts.items():
        console.print(f"{name}: {fact}", highlight=False, markup=False)
    title = report.title
    for rows in _beside_each_other(report, console.width):
        console.print(_table(report, rows, title))
        title = ""
    console.print("Not in this result: " + "; ".join(report.notes) + ".", highlight=False)


def _table(report: Report, rows: Sequence[Row], title: str) -> Table:
    """Make a table of some of the policies."""
    table = Table(title=Text(title) if title else None, title_justify="left")
    table.add_column("", no_wrap=True)
    for row in rows:
        table.add_column(row.policy, justify="right", no_wrap=True)
    for one in shown(report):
        best = best_of(report, one)
        cells = [
            Text(words(row.figures[one.key], one.unit), style="bold green" if row.policy in best else "")
            for row in rows
        ]
        table.add_row(one.label, *cells)
    return table


def _beside_each_other(report: Report, width: int) -> Iterator[list[Row]]:
    """Yield the policies in groups whose columns fit beside each other, with the names of the figures before them."""
    metrics, frame = shown(report), len("│  ")
    names = max(len(one.label) for one in metrics) + frame + 1
    group: list[Row] = []
    used = names
    for row in report.rows:
        column = max(len(row.policy), *(len(words(row.figures[one.key], one.unit)) for one in metrics)) + frame
        if group and used + column > width:
            yield group
            group, used = [], names
        group.append(row)
        used += column
    yield group
