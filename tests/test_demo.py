"""`kvroute demo`, run as a user runs it."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.admin import until
from tests.processes import KVROUTE, Program, descendants

pytestmark = pytest.mark.slow  # real processes, many of them


def test_the_demo_answers_and_leaves_nothing_behind(tmp_path):
    """Requests are answered, a hit rate is printed, and after Ctrl-C every process that was started is gone."""
    command = [*KVROUTE, "demo", "--requests", "40", "--port", "0", "--admin-port", "0"]
    with Program(command, tmp_path / "demo.log", {"COLUMNS": "120"}) as demo:
        rate = float(demo.said(r"hit rate (\d\.\d+)", timeout_s=90).group(1))
        tried = demo.said(r"try +(curl .*)", timeout_s=10).group(1)
        answer = subprocess.run(f"{tried} --silent --fail", shell=True, capture_output=True, timeout=60, check=False)
        assert (answer.returncode, b'"choices"' in answer.stdout) == (0, True), "the command that it names works"
        started = descendants(demo.pid)
        demo.signal(signal.SIGINT)
        code = until(lambda: demo.code, lambda code: code is not None, timeout_s=30)
        assert (code, 0 < rate < 1, re.findall(r"40 of 40", demo.text)) == (0, True, ["40 of 40"] * 2)
        assert len(started) >= 5, "the router, its replicas and the store are processes of their own"
        assert (
            until(lambda: {pid for pid in started if Path(f"/proc/{pid}").exists()}, lambda alive: not alive, 10)
            == set()
        )
