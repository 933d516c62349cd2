"""What every test relies on: under CI=true nothing is skipped, because a test that did not run has shown nothing."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
from hypothesis import settings

IN_CI = os.environ.get("CI", "").lower() == "true"
EXAMPLES = 100 if IN_CI else 25  # of a property test: people run them often, CI has the time to look longer

settings.register_profile("kvroute", deadline=None, max_examples=EXAMPLES)  # a busy machine is no fault of the code
settings.load_profile("kvroute")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skipped test into a failed one in CI."""
    report = yield
    if IN_CI and report.skipped and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn a module that skips itself while it is imported into a failure in CI."""
    report = yield
    if IN_CI and report.skipped:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI does not accept: {report.longrepr}"
    return report
