"""The Lua scripts beside this file, by name. Each runs on one key: the prefix of all keys that it touches."""

from __future__ import annotations

import hashlib
import re
from functools import cache
from importlib.resources import files

from msgspec import Struct

NAMES = (
    *("lookup", "write", "beat", "leave", "drain", "save", "load", "sweep"),  # the index
    *("renew", "changes", "resume", "keep"),  # of replicas that publish events
    *("publish", "reserve", "promises", "tell", "told"),  # the ledger
    *("count", "counts"),  # the account
)


class Script(Struct, frozen=True):
    """A script's text and the name that Redis gives it."""

    name: str
    text: str
    sha: str


@cache
def script(name: str) -> Script:
    """Load a script. A line `--use bits` in it stands for the text of bits.lua."""
    text = re.sub(r"^--use (\w+)$", lambda use: _read(use[1]), _read(name), flags=re.MULTILINE)
    return Script(name, text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _read(name: str) -> str:
    return (files("kvroute.adapters") / f"{name}.lua").read_text("utf-8")
