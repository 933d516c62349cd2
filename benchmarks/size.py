"""How long `kvroute size` takes, as a user waits for it, and what is imported on the way.

    python benchmarks/size.py

The bar is on processor time, which is the waiting time on an idle machine; the shortest waiting time is printed beside.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

from report import Figure, conclude

RUNS = 10
SECONDS_MAX = 0.3
COMMAND = [sys.executable, "-m", "kvroute", "size", "llama-3.1-8b"]
SLOWEST_SHOWN = 8  # imports


def measure(command: list[str]) -> tuple[float, float]:
    """Run a command once; return seconds of waiting and of processor."""
    before, start = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - start, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def imports() -> list[tuple[float, str]]:
    """Return (milliseconds, module) of everything that one run imports, the module's own time, slowest first."""
    command = [COMMAND[0], "-X", "importtime", *COMMAND[1:]]
    done = subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    rows = [line.removeprefix("import time:").split("|") for line in done.stderr.splitlines() if "|" in line]
    return sorted(((int(own) / 1_000, name.strip()) for own, _, name in rows if own.strip().isdigit()), reverse=True)


def main() -> int:
    runs = [measure(COMMAND) for _ in range(RUNS)]
    loaded = imports()
    for milliseconds, name in loaded[:SLOWEST_SHOWN]:
        print(f"{milliseconds:8.1f} ms  {name}")
    return conclude(
        [
            Figure("size_import_s", sum(own for own, _ in loaded) / 1_000, "s"),
            Figure("size_waiting_s_shortest", min(wall for wall, _ in runs), "s"),
            Figure("size_processor_s_median", sorted(cpu for _, cpu in runs)[RUNS // 2], "s", at_most=SECONDS_MAX),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
