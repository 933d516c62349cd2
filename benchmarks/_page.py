"""Runs benchmarks one after the other and writes what they print as a page, with the machine that it was measured on.

    python benchmarks/_page.py [--full] [--page FILE] SCRIPT...

Exit status 1 where a bar is missed or a script fails. A failure of one does not keep the others from running.
"""

from __future__ import annotations

import argparse
import ast
import datetime
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

FIGURE = re.compile(r"^(\w+) +(-?[\d.]+(?:e[+-]\d+)?|nan|inf) ?(.*?)(?: \((at (?:most|least) .*?)\))?( {2}MISSED)?$")
HEAD = """\
# What the router costs

Written by `make bench PAGE=docs/performance.md`. Ratios compare with a baseline that ran in the same minutes on the
same machine; single figures say little about another one. {kind}

{machine}
"""


def machine() -> str:
    """Describe this machine in a line."""
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cpu = found[1] if found else platform.machine()
    cores = len(os.sched_getaffinity(0))
    date = datetime.datetime.now(datetime.UTC).date()
    return f"{date}, {cores} cores of {cpu}, {platform.system()}, Python {platform.python_version()}."


def run(script: str, *, full: bool) -> tuple[list[re.Match[str]], int]:
    """Run a script, showing what it prints; return its figures and its status."""
    print(f"== {script}", flush=True)
    command = [sys.executable, script, *([] if full else ["--quick"])]
    figures = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if figure := FIGURE.match(line.rstrip("\n")):
                figures.append(figure)
    return figures, process.returncode


def section(script: str, figures: list[re.Match[str]]) -> str:
    """Return a script's part of the page."""
    purpose = (ast.get_docstring(ast.parse(Path(script).read_text())) or "").partition("\n")[0]
    rows = [f"| {f[1]} | {f[2]} {f[3]}".rstrip() + f" | {f[4] or ''} | {'missed' if f[5] else ''} |" for f in figures]
    table = "\n".join(["| figure | value | bar | |", "| --- | ---: | --- | --- |", *rows])
    return f"\n## {script}\n\n{purpose}\n\n{table}\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="longer and steadier")
    parser.add_argument("--page", type=Path, help="where to write the page")
    parser.add_argument("scripts", nargs="+")
    args = parser.parse_args()
    kind = "" if args.full else "Short runs (`FULL=1` takes longer and is steadier)."
    page, bad = HEAD.format(kind=kind, machine=machine()).replace("  \n", "\n"), []
    for script in args.scripts:
        figures, status = run(script, full=args.full)
        page += section(script, figures)
        if status:
            bad.append(script)
    if args.page:
        args.page.write_text(page)
    if bad:
        print(f"missed a bar, or failed: {' '.join(bad)}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
