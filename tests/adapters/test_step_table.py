"""Tables of step times as files."""

from __future__ import annotations

import pytest

from kvroute.adapters.step_table import BYTES_LIMIT, read_step_table
from kvroute.errors import ConfigError
from kvroute.sim.engine import seconds
from kvroute.sim.measured import MeasuredTime, rows_of

CSV = "\ufeffkind, count, context, seconds\ndecode, 1, 1000, 0.01\nprefill, 100, 0, 0.02\n"
YAML = """
- {kind: decode, count: 1, context: 1000, seconds: 0.01}
- {kind: prefill, count: 100, context: 0, seconds: 0.02}
"""


@pytest.mark.parametrize(("name", "text"), [("times.csv", CSV), ("times.yaml", YAML), ("times.yml", YAML)])
def test_csv_and_yaml_say_the_same(tmp_path, name, text):
    """A table becomes step times, whichever way it is written."""
    path = tmp_path / name
    path.write_text(text)
    time = MeasuredTime(rows_of(read_step_table(path)))
    assert seconds(time.decode_fs(3, 1, 1000)) == pytest.approx(0.03)


@pytest.mark.parametrize(
    ("name", "data", "said"),
    [
        ("a.yaml", b"kind: decode", "must be a list of rows"),
        ("a.yaml", b"- [1", "not YAML"),
        ("a.csv", b"\xff\xfe", "UTF-8"),
        ("a.csv", b" " * (BYTES_LIMIT + 1), "larger than 4 MiB"),
        ("a.csv", b'kind\n"' + b"x" * 200_000, "not CSV"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path, name, data, said):
    """The error names the file and what is wrong with it."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=said):
        read_step_table(path)


def test_a_missing_file_is_named(tmp_path):
    """The error says which file."""
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        read_step_table(tmp_path / "none.csv")


def test_a_heading_without_a_column_is_told_by_the_table(tmp_path):
    """A column that is missing is named with its row."""
    path = tmp_path / "times.csv"
    path.write_text("kind,count,seconds\ndecode,1,0.01\n")
    with pytest.raises(ConfigError, match="row 1: context is missing"):
        rows_of(read_step_table(path))
