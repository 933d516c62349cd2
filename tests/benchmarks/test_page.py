"""The page of all benchmarks' figures."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "_page.py"
SCRIPT = '''"""What a test measures."""
print("a line of another kind")
print("cpu                                      12 us")
print("ratio                                    1.7 x (at most 1.6)  MISSED")
raise SystemExit(1)
'''


def test_figures_become_a_page(tmp_path):
    """Every figure is a row with its bar; a missed one is named, and the others run all the same."""
    scripts = [tmp_path / "one.py", tmp_path / "two.py"]
    for script in scripts:
        script.write_text(SCRIPT)
    command = [sys.executable, str(PAGE), "--page", str(tmp_path / "page.md"), *map(str, scripts)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith(f"missed a bar, or failed: {scripts[0]} {scripts[1]}\n")
    page = (tmp_path / "page.md").read_text()
    assert page.count("What a test measures.") == 2
    assert page.count("| cpu | 12 us |  |  |") == 2
    assert page.count("| ratio | 1.7 x | at most 1.6 | missed |") == 2
    assert "another kind" not in page
