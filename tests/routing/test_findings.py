"""What makes a pool blind."""

import pytest

from kvroute.routing.findings import Finding, is_blind


@pytest.mark.parametrize(("levels", "blind"), [((), False), (("ok", "note", "warn"), False), (("ok", "fail"), True)])
def test_only_a_failure_makes_routing_blind(levels, blind):
    """Warnings cost something, but the router still knows what it does."""
    assert is_blind(Finding("check", level, "is so") for level in levels) is blind
