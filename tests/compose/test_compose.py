"""docker-compose.yml, run as processes: two routers, four simulated replicas, one index."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.admin import fetch, until
from tests.compose.composed import FILE, Composed

pytestmark = pytest.mark.slow  # real processes, many of them

ROOT = Path(__file__).parents[2]
LOCUST = [
    sys.executable,
    "-m",
    "locust",
    "-f",
    str(ROOT / "loadtests" / "locustfile.py"),
    "--headless",
    "--only-summary",
]
LOAD = ["-u", "6", "-r", "6", "-t", "5s", "--system-tokens", "600", "--answer-tokens", "16"]


def report(admin: str) -> dict[str, Any]:
    sums: dict[str, Any] = json.loads(fetch(f"{admin}/admin/hit-rate"))["windows"]["all"]["total"]
    return sums


def test_both_routers_report_one_hit_rate(tmp_path):
    """Locust traffic through both routers is answered without a failure, and both tell one hit rate, of the whole."""
    with Composed(tmp_path) as composed:
        loads = [
            subprocess.Popen(
                [*LOCUST, *LOAD, "--seed", name, "--host", composed.url(f"router-{name}", "8000")],
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for name in ("1", "2")
        ]
        outputs = [load.communicate(timeout=60)[0] for load in loads]
        assert [load.returncode for load in loads] == [0, 0], outputs
        admins = [composed.url(f"router-{name}", "8001") for name in ("1", "2")]
        first, second = until(
            lambda: [report(admin) for admin in admins], lambda both: both[0] == both[1], timeout_s=10
        )
        assert first == second
        assert (first["requests"] > 0, first["delivered_tokens"] > 0, first["hit_rate"] > 0) == (True, True, True)


def test_every_service_is_checked_and_published_on_loopback_alone():
    """A service without a health check, or a port open to the network, is a mistake in the file."""
    services = yaml.safe_load(FILE.read_text())["services"]
    assert [name for name, service in services.items() if "healthcheck" not in service] == []
    ports = [port for service in services.values() for port in service.get("ports", ())]
    assert [port for port in ports if not port.startswith("127.0.0.1:")] == []
