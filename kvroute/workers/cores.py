"""How many workers there shall be: what the settings say, else one for each core that this process may use.

Cores are what the scheduler allows, within what a container's quota pays for.
"""

from __future__ import annotations

import math
import os
import socket
from pathlib import Path

from kvroute.config import Config
from kvroute.errors import ConfigError

WORKERS_DEFAULT_MAX = 8  # where nobody says how many
_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: microseconds in each period of so many


def workers_for(config: Config) -> int:
    """Return the number of processes.

    Raises:
        ConfigError: there cannot be so many.
    """
    count = config.workers
    can_share = hasattr(socket, "SO_REUSEPORT")
    if config.store.kind == "memory" or not can_share:
        if count is not None and count > 1:
            what = "cannot share a port on this system" if not can_share else "cannot share an index in memory"
            raise ConfigError(f"`workers`: {count} processes {what}; set `workers`: 1, or `store.kind`: redis")
        return 1
    return min(usable_cores(), WORKERS_DEFAULT_MAX) if count is None else count


def usable_cores(quota: Path = _QUOTA) -> int:
    """Return the number of cores, at least 1."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        granted, period = quota.read_text().split()
        cores = min(cores, math.ceil(int(granted) / int(period)))
    except (OSError, ValueError, ZeroDivisionError):  # no cgroup v2, or "max": no quota
        pass
    return max(1, cores)
