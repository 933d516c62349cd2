"""Numbers on the command line."""

from __future__ import annotations

import click
import pytest
from click.testing import CliRunner

from kvroute.cli import main
from kvroute.cli_types import Finite

FLOATS = [
    (command, option)
    for command in (main.get_command(click.Context(main), name) for name in main.list_commands(click.Context(main)))
    for option in command.params
    if isinstance(option.type, click.FloatRange)
]


def test_there_are_numbers_to_check():
    """The list is not empty by mistake."""
    assert len(FLOATS) > 10


@pytest.mark.parametrize(("command", "option"), FLOATS, ids=lambda one: one.name)
def test_every_range_of_every_command_is_of_finite_numbers(command, option):
    """`nan` passes every comparison with a range, and no command may start with it."""
    assert isinstance(option.type, Finite), f"{command.name} {option.opts[0]} takes nan: use Finite"


@pytest.mark.parametrize("text", ["nan", "inf", "-inf", "-1", "2", "x"])
def test_what_is_no_number_of_the_range_is_refused_by_name(text):
    """The message names the option, and nothing runs."""

    @click.command()
    @click.option("--share", type=Finite(0, 1))
    def command(share: float) -> None:
        click.echo("played")

    done = CliRunner().invoke(command, [f"--share={text}"])
    assert done.exit_code == 2
    assert "--share" in done.output
    assert "played" not in done.output
