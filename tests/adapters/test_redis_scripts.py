"""The scripts: all load, and the sets of slots that they keep obey the laws of sets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.adapters.redis_scripts import NAMES, script
from tests.redis_servers import server

EDIT = """
--use bits
local set = nil
for i = 1, #ARGV, 2 do
  local slot = tonumber(ARGV[i + 1])
  local change = ARGV[i] == '+' and with or without
  set = change(set, math.floor(slot / 8), 2 ^ (slot % 8))
end
return set
"""


@pytest.fixture(scope="module")
def client() -> Iterator[redis.Redis]:
    with server() as one, one.client() as client:
        yield client


@pytest.mark.parametrize("name", NAMES)
def test_scripts_load(client, name):
    """Every script compiles, under the name that we call it by."""
    assert client.script_load(script(name).text) == script(name).sha
    assert "--use" not in script(name).text


@given(st.lists(st.tuples(st.sampled_from("++-"), st.integers(0, 503)), max_size=40))
@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_sets_of_slots(client, edits):
    """Whatever was added and taken out, the bytes are the set's only spelling, and at most 64 of them."""
    expected: set[int] = set()
    for op, slot in edits:
        expected = expected | {slot} if op == "+" else expected - {slot}
    text = EDIT.replace("--use bits", script("write").text.split("local prefix")[0].split("group.\n")[-1])
    found = client.eval(text, 0, *(part for edit in edits for part in edit))
    if not expected:
        assert found is None
        return
    mask = sum(1 << slot for slot in expected)
    low = min(expected) // 8
    assert found == bytes([low]) + (mask >> 8 * low).to_bytes(max(expected) // 8 - low + 1, "little")
    assert len(found) <= 64
