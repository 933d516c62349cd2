"""Processes pinned to cores, and the CPU time that they used."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # a benchmark is run as a script; the process helpers are the tests'

from tests.processes import Program, Router, Valkey, descendants, free_port  # noqa: E402
from tests.vllm.make_model import corpus, write_model  # noqa: E402

__all__ = ["Program", "Router", "Valkey", "corpus", "descendants", "free_port", "write_model"]  # for the benchmarks

CORES = sorted(os.sched_getaffinity(0))
ROUTER_CORE, LOAD_CORE = {CORES[0]}, {CORES[-1]}


def pinned(program: Program, cores: set[int]) -> Program:
    """Start a program on some cores; what it starts stays there too."""
    here = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        return program.start()
    finally:
        os.sched_setaffinity(0, here)


def cpu_s(pid: int) -> float:
    """Return the seconds of CPU that a process's living threads have used, by the scheduler's own clock."""
    total_ns = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        total_ns += int((thread / "schedstat").read_text().split()[0])
    return total_ns / 1e9


def spent(pids: list[int], work: Callable[[], int]) -> tuple[list[float], int]:
    """Do some work; return the CPU seconds that each process used meanwhile, and what the work returned."""
    before = [cpu_s(pid) for pid in pids]
    done = work()
    return [cpu_s(pid) - start for pid, start in zip(pids, before, strict=True)], done
