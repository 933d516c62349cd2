"""The account: bounded sums in buckets, as deltas that any number of routers can add up."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvroute.routing.account import (
    ALL_TIME,
    COARSE_LIFE_S,
    FINE_LIFE_S,
    LABELS_MAX,
    UNFOLDED_MAX,
    Account,
    Entry,
    bucket_life_s,
    clean,
)

ENTRY = Entry("r0", "m", "a", prompt_tokens=100, seen=90, reachable=80, predicted=64, delivered=48, completion_tokens=7)


def drained(*entries: tuple[Entry, float]) -> dict[tuple[int, str], int]:
    account = Account()
    for entry, now in entries:
        account.add(entry, now)
    return {(bucket, field): delta for bucket, field, delta in account.drain()}


def test_an_entry_counts_in_its_ten_seconds_its_minute_and_all_time():
    """Bucket starts are Unix time; a minute's bucket is its start plus one, all time is bucket 0."""
    rows = drained((ENTRY, 1_234_567.8))
    assert {bucket for bucket, _ in rows} == {1_234_560, 1_234_561 - 1_234_560 % 60, ALL_TIME}


def test_an_entry_counts_for_the_whole_and_for_each_label():
    """Replica, model and tenant each have the same sums as the whole."""
    rows = drained((ENTRY, 100.0))
    groups = {field.partition("|")[0] for _, field in rows}
    assert groups == {"all", "replica=r0", "model=m", "tenant=a"}
    assert {rows[ALL_TIME, f"{group}|predicted_tokens"] for group in groups} == {64}


def test_deltas_are_drained_once():
    """What was handed over is not handed over again."""
    account = Account()
    account.add(ENTRY, 100.0)
    assert account.drain()
    assert account.drain() == []


def test_unreported_hits_are_not_guessed():
    """A request whose engine does not report cached tokens adds to no sum that is compared with delivered ones."""
    rows = drained((ENTRY, 100.0), (replace(ENTRY, delivered=None), 100.0))
    assert rows[ALL_TIME, "all|prompt_tokens"] == 200
    assert rows[ALL_TIME, "all|known_prompt_tokens"] == 100
    assert rows[ALL_TIME, "all|known_reachable_tokens"] == 80
    assert rows[ALL_TIME, "all|delivered_tokens"] == 48


def test_tenants_are_bounded():
    """However many tenants there are, 256 have a label and the rest share one."""
    entries = [(replace(ENTRY, tenant=f"t{number}"), 100.0) for number in range(400)]
    rows = drained(*entries)
    tenants = {field.partition("|")[0] for _, field in rows if field.startswith("tenant=")}
    assert len(tenants) == LABELS_MAX["tenant"] + 1
    assert rows[ALL_TIME, "tenant=other|requests"] == 400 - LABELS_MAX["tenant"]
    assert rows[ALL_TIME, "all|requests"] == 400


def test_labels_cannot_break_out():
    """A name may hold our separator, control characters or a novel: it stays one short label."""
    assert clean("a|b\n\x00") == "a_b__"
    assert len(clean("x" * 10_000)) == 128
    assert clean("") == "unnamed"


def test_an_account_that_nobody_drains_is_bounded():
    """Days without a store leave the buckets that some window still reaches, not one for every ten seconds."""
    account = Account()
    for turn in range(3 * UNFOLDED_MAX):
        account.add(ENTRY, 1e9 + 10.0 * turn)
    buckets = {bucket for bucket, _, _ in account.drain()}
    assert len(buckets) <= FINE_LIFE_S // 10 + COARSE_LIFE_S // 60 + 2
    assert ALL_TIME in buckets


def test_each_bucket_says_how_long_it_lives():
    """A store can drop a bucket without knowing what is in it."""
    assert bucket_life_s(ALL_TIME) is None
    assert (bucket_life_s(1_200), bucket_life_s(1_201)) == (FINE_LIFE_S, COARSE_LIFE_S)


@given(st.lists(st.tuples(st.integers(0, 1000), st.none() | st.integers(0, 500), st.integers(0, 200)), max_size=60))
def test_all_time_sums_are_exact_and_windows_add_up_to_them(requests: list[tuple[int, int | None, int]]):
    """Every group's sums equal the plain sums, and so do the fine buckets together and the coarse ones together."""
    entries = [
        (replace(ENTRY, prompt_tokens=prompt, delivered=delivered, tenant=f"t{at % 3}"), 1e6 + at)
        for prompt, delivered, at in requests
    ]
    by_kind: dict[str, int] = defaultdict(int)
    for (bucket, field), delta in drained(*entries).items():
        group, _, name = field.partition("|")
        if name == "delivered_tokens":
            kind = "all" if bucket == ALL_TIME else "fine" if bucket % 10 == 0 else "coarse"
            by_kind[kind, group.partition("=")[0]] += delta
    expected = sum(delivered or 0 for _, delivered, _ in requests)
    assert set(by_kind.values()) == ({expected} if expected else set())
