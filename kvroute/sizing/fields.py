"""A careful reader of the JSON objects that describe models: every complaint names the field and what would be right.

Published configurations spell the same fact in several ways; `of` takes them all, in order of preference. What was not
stated and had to be assumed is kept in `notes`, so that nothing is guessed silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kvroute.errors import ConfigError

INTEGER_LIMIT = 1 << 40  # above every size in use, below where products stop being meaningful


class Fields:
    """One JSON object of a configuration. `notes` is shared by all objects of the same configuration."""

    def __init__(self, data: Mapping[str, Any], path: str = "", notes: list[str] | None = None) -> None:
        self.data = data
        self.path = path
        self.notes = [] if notes is None else notes

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.data.get(name) is not None

    def whole(self, *names: str, least: int = 1, most: int = INTEGER_LIMIT) -> int | None:
        """Return the first of the named fields as a whole number, None where all are absent."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.wrong(name, f"must be a whole number, not {shown(value)}")
            if not least <= value <= most:
                raise self.wrong(name, f"must be from {least:,} to {most:,}, not {shown(value)}")
            return value
        return None

    def needed(self, *names: str, least: int = 1, most: int = INTEGER_LIMIT) -> int:
        """Return the first of the named fields as a whole number; refuse a configuration that has none of them."""
        value = self.whole(*names, least=least, most=most)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if names[1:] else ""
            raise ConfigError(f"{self.path}{names[0]} is missing{others}: without it the cache cannot be sized")
        return value

    def assumed(self, value: int, *names: str, why: str, least: int = 1, most: int = INTEGER_LIMIT) -> int:
        """Return the field, or `value` with a note that says why it was assumed."""
        found = self.whole(*names, least=least, most=most)
        if found is None:
            self.notes.append(f"{self.path}{names[0]} is not stated: {value:,} assumed, {why}")
            return value
        return found

    def flag(self, name: str) -> bool | None:
        """Return a yes-or-no field, None where it is absent."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, f"must be true or false, not {shown(value)}")
        return value

    def word(self, *names: str) -> str | None:
        """Return the first of the named fields that is there, as a string."""
        for name in names:
            value = self.data.get(name)
            if value is None:
                continue
            if not isinstance(value, str):
                raise self.wrong(name, f"must be a string, not {shown(value)}")
            return value
        return None

    def items(self, name: str) -> Sequence[Any] | None:
        """Return a list field, None where it is absent."""
        value = self.data.get(name)
        if value is not None and not isinstance(value, list):
            raise self.wrong(name, f"must be a list, not {shown(value)}")
        return value

    def inner(self, name: str) -> Fields | None:
        """Return an object inside this one, None where it is absent."""
        value = self.data.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(name, f"must be an object, not {shown(value)}")
        return Fields(value, f"{self.path}{name}.", self.notes)

    def wrong(self, name: str, what: str) -> ConfigError:
        """Make the complaint about one field."""
        return ConfigError(f"{self.path}{name} {what}")


def shown(value: object, limit: int = 60) -> str:
    """Show a value of somebody else's file in one short line."""
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    if isinstance(value, int) and value.bit_length() > 200:  # Python refuses to print integers past 4,300 digits
        return "a number of more than 60 digits"
    text = repr(value[: limit + 1] if isinstance(value, str) else value)
    return text if len(text) <= limit else f"{text[:limit]}..."
