"""The hit rate: ratios of sums over windows, and where the rest was lost."""

from __future__ import annotations

import msgspec
import pytest

from kvroute.routing.account import Account, Entry
from kvroute.routing.hitrate import HitRate, hit_rate

NOW = 1_000_000.0


def report(*entries: tuple[float, Entry], now: float = NOW) -> HitRate:
    """Report entries of given ages in seconds."""
    account = Account()
    for age, entry in sorted(entries, key=lambda each: -each[0]):
        account.add(entry, now - age)
    return hit_rate(account.drain(), now)


def entry(prompt: int, delivered: int | None, **fields: object) -> Entry:
    given = {"replica": "r0", "model": "m", "tenant": "a", "seen": prompt, "reachable": prompt, "predicted": prompt}
    return Entry(prompt_tokens=prompt, delivered=delivered, **{**given, **fields})


def test_the_rate_is_a_ratio_of_sums():
    """A hit of 10 of 10 tokens and a miss of 990 make one per cent, not fifty."""
    total = report((0, entry(10, 10)), (0, entry(990, 0))).windows["all"].total
    assert total.hit_rate == pytest.approx(0.01)


def test_every_loss_has_its_cause():
    """Seen less reachable is eviction's, reachable less predicted routing's, predicted less delivered the index's."""
    total = report((0, entry(100, 40, seen=90, reachable=70, predicted=55))).windows["1m"].total
    losses = (total.lost_to_eviction_tokens, total.lost_to_routing_tokens, total.lost_to_index_tokens)
    assert losses == (20, 15, 15)
    assert (total.seen_share, total.reachable_share, total.predicted_share) == (0.9, 0.7, 0.55)
    assert total.delivered_of_reachable == pytest.approx(40 / 70)
    assert total.predicted_of_delivered == pytest.approx(55 / 40)


def test_like_is_compared_with_like():
    """Requests whose engine is silent about its cache change no ratio with delivered tokens in it."""
    total = report((0, entry(100, 50)), (0, entry(900, None))).windows["all"].total
    assert (total.hit_rate, total.delivered_of_reachable, total.lost_to_index_tokens) == (0.5, 0.5, 50)
    assert total.prompt_tokens == 1_000


def test_nothing_counted_is_no_rate():
    """An empty window has no ratio, rather than a bad one."""
    windows = report().windows
    assert list(windows) == ["1m", "5m", "1h", "all"]
    assert windows["1m"].total.hit_rate is None
    assert windows["1m"].total.requests == 0


def test_windows_reach_as_far_back_as_they_say():
    """Every age within a window counts in it, and nothing that is older by more than one bucket."""
    ages = {"1m": (60, 70), "5m": (300, 310), "1h": (3_600, 3_660)}
    for window, (inside_s, outside_s) in ages.items():
        for offset in (0.0, 3.0, 9.9, 31.0, 59.9):
            now = NOW + offset
            assert report((inside_s, entry(1, 1)), now=now).windows[window].total.requests == 1
            assert report((outside_s, entry(1, 1)), now=now).windows[window].total.requests == 0
    assert report((40 * 86_400, entry(1, 1))).windows["all"].total.requests == 1


def test_labels_split_the_whole():
    """By replica, by model and by tenant the same requests are told apart."""
    window = report((0, entry(100, 50)), (0, entry(300, 30, replica="r1", tenant="b"))).windows["5m"]
    assert {name: shares.hit_rate for name, shares in window.by_replica.items()} == {"r0": 0.5, "r1": 0.1}
    assert {name: shares.prompt_tokens for name, shares in window.by_tenant.items()} == {"a": 100, "b": 300}
    assert window.by_model["m"] == window.total


def test_routers_rows_add_up():
    """Rows of several routers make the report that one router with all requests would have made."""
    rows, both = [], Account()
    for number in range(3):
        account = Account()
        for counter in (account, both):
            counter.add(entry(100 + number, 50), NOW)
        rows += account.drain()
    assert hit_rate(rows, NOW) == hit_rate(both.drain(), NOW)


def test_the_report_is_encodable_and_generated_hits_stand_apart():
    """The endpoint can send the report as it is; blocks of earlier answers are counted but in no ratio."""
    plain, generated = report((0, entry(100, 50))), report((0, entry(100, 50, generated_hits=32)))
    decoded = msgspec.json.decode(msgspec.json.encode(generated))
    assert decoded["windows"]["all"]["total"]["generated_tokens"] == 32
    assert generated.windows["all"].total.hit_rate == plain.windows["all"].total.hit_rate


def test_fields_of_a_newer_version_are_ignored():
    """Routers of two versions may share a store during an update."""
    rows = [(0, "all|prompt_tokens", 5), (0, "all|novelty", 1), (0, "zone=x|prompt_tokens", 1)]
    assert hit_rate(rows, NOW).windows["all"].total.prompt_tokens == 5
