"""Whatever is said, lost, delivered and handed on: a table agrees with itself, and a store with what it was told."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.events import REPORT_SESSION
from tests.kv.encoded import cleared, removed, stored
from tests.kv.test_engine_hashes import MODEL, chain, tell
from tests.kv.test_hit_ends import STATE, WINDOW


def name(ids: list[int]) -> int | None:
    return int("1" + "".join(map(str, ids))) if ids else None


def prompt(rng: random.Random) -> list[int]:
    return rng.choices(range(2), k=rng.randint(1, 5))


def storing(rng: random.Random, groups: list[int | None]) -> dict[str, Any]:
    """Return an event that is nearly always sound: of any group, tier and kind, with an adapter, media or a report."""
    ids = prompt(rng)
    start = rng.randrange(len(ids))
    names, tokens = [name(ids[: n + 1]) for n in range(start, len(ids))], ids[start:]
    rest: dict[str, Any] = {"group_idx": rng.choice(groups), "extra_keys": None}
    rest = rng.choice([rest] * 7 + [dict(WINDOW)] * 2 + [dict(STATE)])
    if rng.random() < 0.2:
        rest["medium"] = rng.choice(["CPU", "disk"])
    if rng.random() < 0.1:
        rest["session_id"] = REPORT_SESSION
    if rng.random() < 0.05:
        rest["lora_name"] = "a"
    if rng.random() < 0.05:
        rest["extra_keys"] = [["img", 0]] * len(names)
    if rng.random() < 0.05:
        tokens = [*tokens, 1]
    return stored(names[: -1 if rng.random() < 0.05 else None], name(ids[:start]), tokens, 1, **rest)


def removing(rng: random.Random, groups: list[int | None]) -> dict[str, Any]:
    names = [name(prompt(rng)) for _ in range(rng.randint(1, 3))]
    return removed(*names, group_idx=rng.choice([*groups, 1, 2]), medium=rng.choice(["GPU"] * 5 + ["CPU"]))


def take(store: list[set[int]], known: EngineHashes) -> None:
    for change in known.changes():
        store[change.tier] -= set(memoryview(change.gone).cast("Q"))
        store[change.tier] |= set(memoryview(change.added).cast("Q"))


def again(known: EngineHashes) -> EngineHashes:
    """Hand a table on; what arrives is what was sent."""
    fresh = EngineHashes.unpack(known.pack(), MODEL, known.capacity_blocks)
    before, after = (
        (one.tree.cells, one.ends.cells, one._copies.on_gpu, len(one), one.suspects, len(one._learnt), one.can_learn)
        for one in (known, fresh)
    )
    assert before == after
    return fresh


def check(known: EngineHashes) -> None:
    tree, copies, blocks = known.tree, known._copies, set(known._blocks.values())
    known._settle()
    assert known._learnt <= set(known._suspects) <= blocks
    assert len(blocks) == len(known._blocks) == len(tree)
    assert copies.on_gpu == sum(copies.gpu)
    ends = Counter(tree.cell(block) for block in blocks if known.ends._is_end[block : block + 1] == b"\1")
    assert ends == Counter(known.ends.cells)
    for block, called in enumerate(known._names):
        if known._blocks.get(called) != block:
            assert not copies.has_any(block), "a block that is not there has copies"
            continue
        for tier in range(3):
            assert bool(tree.held(block) >> tier & 1) == copies.is_whole(block, tier)
        assert copies.has_any(block) or tree.has_children(block), "a block is kept for nothing"
    for group in known.ends.groups.values():
        assert {called for called in group.copies if isinstance(called, bytes)} <= set(known._blocks)


@settings(max_examples=200, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from([16, 20, 32]), st.sampled_from([[0], [0, 1], [None]]))
def test_any_table_is_sound(rng, release, groups):
    """In any order and of any release."""
    known = EngineHashes(MODEL, rng.choice([3, 8, 100]), rng.choice([None, 1]))
    store: list[set[int]] = [set() for _ in range(4)]
    for _ in range(rng.randint(1, 60)):
        what = rng.choices(["store", "remove", "clear", "lose", "deliver", "take", "pack"], [45, 25, 2, 6, 17, 3, 2])[0]
        if what == "lose":
            known.suspect()
        elif what == "deliver":
            ids = prompt(rng)
            known.delivered(chain(*ids), rng.randint(0, len(ids)))
        elif what in ("take", "pack"):
            take(store, known)
            known = again(known) if what == "pack" else known
        else:
            event = {"store": storing, "remove": removing}.get(what, lambda *_: cleared())(rng, groups)
            tell(known, event, release=release)
        check(known)
    take(store, known)
    assert store == [*map(set, known.tree.cells), set(known.ends.cells)]
