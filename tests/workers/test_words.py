"""What is told comes out as it was told, in one line."""

from __future__ import annotations

import msgspec

from kvroute.config import load
from kvroute.workers.words import Assignment, Said, line


def test_settings_survive_the_way():
    """All settings, keys included, arrive as they were."""
    overrides = {"replicas": [{"url": "http://a:1", "api_key": "secret"}], "tenants.keys": {"team": "key"}}
    told = Assignment(
        config=load(None, env={}, overrides=overrides),
        slot=1,
        sockets=(7, 8),
        counts=9,
        inbox=10,
        outboxes={0: 11, 1: 12},
        admin="/tmp/x",
    )
    assert msgspec.json.decode(line(told), type=Assignment) == told


def test_a_page_is_one_line():
    """Whatever is said stands in a single line."""
    said = Said(metrics="# HELP a\na 1\n")
    assert line(said).count(b"\n") == 1
    assert msgspec.json.decode(line(said), type=Said) == said
