"""Reads a router's admin listener as a person or a script would: over HTTP, again until it says what is awaited."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def fetch(url: str) -> str:
    with urllib.request.urlopen(url, timeout=10) as answer:
        text: str = answer.read().decode()
    return text


def until(read: Callable[[], T], holds: Callable[[T], bool], timeout_s: float) -> T:
    """Read again until `holds`, and return the last value read in any case, for an assertion to show."""
    deadline = time.monotonic() + timeout_s
    while not holds(value := read()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return value


def hit_rate(admin: str, *, requests: int, timeout_s: float = 10.0) -> dict[str, Any]:
    """Return the sums over all time and replicas, once `requests` requests are in them."""

    def read() -> dict[str, Any]:
        sums: dict[str, Any] = json.loads(fetch(f"{admin}/admin/hit-rate"))["windows"]["all"]["total"]
        return sums

    sums = until(read, lambda sums: sums["requests"] >= requests, timeout_s)
    assert sums["requests"] == requests
    return sums


def replicas(admin: str) -> list[dict[str, Any]]:
    """Return the rows of /admin/replicas."""
    rows: list[dict[str, Any]] = json.loads(fetch(f"{admin}/admin/replicas"))["replicas"]
    return rows


def metric(url: str, name: str, **labels: str) -> float:
    """Sum a metric's samples whose labels include those given; 0 where there are none."""
    total = 0.0
    for found in re.finditer(rf"^{name}(?:\{{(.*)\}})? (\S+)$", fetch(f"{url}/metrics"), re.MULTILINE):
        if all(f'{label}="{value}"' in (found[1] or "") for label, value in labels.items()):
            total += float(found[2])
    return total
