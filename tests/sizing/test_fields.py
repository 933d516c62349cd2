"""The reader of configurations: names in, names out."""

import pytest

from kvroute.errors import ConfigError
from kvroute.sizing.fields import Fields, shown


def test_the_first_spelling_that_is_there_counts():
    """Later names are used only where earlier ones are absent or null."""
    assert Fields({"a": None, "b": 2, "c": 3}).whole("a", "b", "c") == 2
    assert Fields({}).whole("a") is None
    assert Fields({"a": 8.0}).whole("a") == 8


def test_a_missing_field_names_its_spellings():
    """The message has the path, the name and the other names."""
    inner = Fields({"text_config": {}}).inner("text_config")
    with pytest.raises(ConfigError, match=r"text_config.layers is missing \(or n_layer\)"):
        inner.needed("layers", "n_layer")


def test_an_assumption_is_noted():
    """A default leaves a note that says why; a stated value leaves none."""
    fields = Fields({"b": 5})
    assert (fields.assumed(4, "a", why="as the family does"), fields.assumed(4, "b", why="")) == (4, 5)
    assert fields.notes == ["a is not stated: 4 assumed, as the family does"]


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ([1], "a list"),
        ({}, "an object"),
        ("x" * 99, "'" + "x" * 59 + "..."),
        (10**400, "a number of more than 60 digits"),
        (3.5, "3.5"),
    ],
)
def test_values_are_shown_short(value, words):
    """Whatever a file holds, a complaint stays one short line."""
    assert shown(value) == words


@pytest.mark.parametrize(("method", "value"), [("flag", 1), ("word", 3), ("items", "x"), ("inner", [])])
def test_wrong_types_are_refused(method, value):
    """Each kind of field refuses the others by name."""
    with pytest.raises(ConfigError, match="a must be"):
        getattr(Fields({"a": value}), method)("a")
