"""A table of measured step times from a file: CSV with a heading, or a YAML list of mappings.

Only the form is read here; what the columns mean is in `kvroute.sim.measured`.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import yaml

from kvroute.errors import ConfigError

BYTES_LIMIT = 4 << 20  # some 100,000 rows


def read_step_table(path: Path) -> list[dict[str, Any]]:
    """Read the rows of a table; by its ending a file is YAML (.yaml, .yml) or else CSV.

    Raises:
        ConfigError: it cannot be read, is too large, or is no table.
    """
    try:
        with path.open("rb") as file:
            data = file.read(BYTES_LIMIT + 1)
        text = data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path}: not text in UTF-8") from None
    if len(data) > BYTES_LIMIT:
        raise ConfigError(f"{path}: larger than {BYTES_LIMIT >> 20} MiB; a table of step times has some hundred rows")
    return _from_yaml(path, text) if path.suffix in (".yaml", ".yml") else _from_csv(path, text)


def _from_yaml(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        rows = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path}: not YAML: {error}") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path}: must be a list of rows, each with kind, count, context and seconds")
    return rows


def _from_csv(path: Path, text: str) -> list[dict[str, Any]]:
    try:
        rows = list(csv.DictReader(text.splitlines(), skipinitialspace=True))
    except csv.Error as error:
        raise ConfigError(f"{path}: not CSV: {error}") from None
    return [{(name or "").strip(): value for name, value in row.items()} for row in rows]
