"""The rule of tests/conftest.py, tried on a suite of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).with_name("conftest.py")
SUITE = {
    "test_one.py": "import pytest\n@pytest.mark.skip\ndef test_a(): ...\n@pytest.mark.xfail\ndef test_b(): assert 0\n",
    "test_two.py": "import pytest\npytest.skip('no such thing here', allow_module_level=True)\n",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ci", "status", "summary"), [("true", 1, "1 xfailed, 2 errors"), ("", 0, "2 skipped, 1 xfailed")]
)
def test_a_skip_fails_in_ci_alone(tmp_path, ci, status, summary):
    """A skipped test or module fails the run under CI=true and is accepted elsewhere."""
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    for name, text in SUITE.items():
        (tmp_path / name).write_text(text)
    command = [sys.executable, "-m", "pytest", "--rootdir=.", "--continue-on-collection-errors", "."]
    environment = os.environ | {"CI": ci}
    run = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (run.returncode, summary in run.stdout) == (status, True), run.stdout
