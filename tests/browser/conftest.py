"""A browser for the tests of pages. `make test-browser` installs one where there is none."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.browser.chromium import Page, chromium, page


@pytest.fixture
async def browser(tmp_path: Path) -> AsyncIterator[Page]:
    """Give a tab; whatever its page's scripts ran into fails the test."""
    if chromium() is None:
        pytest.skip("no Chromium is installed: make test-browser")
    async with page(tmp_path / "profile") as tab:
        yield tab
        # A router that has ended before its page was closed is asked in vain.
        assert [fault for fault in tab.faults if "net::ERR_" not in fault and " 503 " not in fault] == []
