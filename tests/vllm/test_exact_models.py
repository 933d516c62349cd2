"""The index against real engines that are more than one cache: two ranks, a LoRA adapter, a hybrid model."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes import Valkey, free_port
from tests.vllm.engines import SERVED_NAME, Engines
from tests.vllm.make_model import write_adapter, write_hybrid
from tests.vllm.rig import BLOCK, SMALL, Rig, free_pair, routed

RANKS = ("--data-parallel-size", "2", "--api-server-count", "1")
ADAPTER = "tuned"


def ids(seed: int, blocks: int) -> list[int]:
    """Return the tokens of so many whole blocks, and one more."""
    rng = random.Random(seed)
    return [rng.randrange(1000, 4000) for _ in range(blocks * BLOCK + 1)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engines]:
    """An engine of two data-parallel ranks that serves an adapter too."""
    folder = tmp_path_factory.mktemp("ranks")
    adapter = write_adapter(folder / ADAPTER, model_dir, seed=1)
    lora = ("--enable-lora", "--max-lora-rank", "8", "--lora-modules", f"{ADAPTER}={adapter}")
    with Engines(model_dir, folder) as engines:
        yield engines.start([(free_port(), free_pair(), free_pair())], *SMALL, *RANKS, *lora)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory, model_dir: Path) -> Iterator[Engines]:
    """An engine whose model has a layer that sees only a window."""
    folder = tmp_path_factory.mktemp("hybrid")
    with Engines(write_hybrid(folder / "model", model_dir), folder) as engines:
        yield engines.start([(free_port(), free_port(), free_port())], *SMALL)


@pytest.fixture
async def rig(ranks: Engines, valkey: Valkey):
    """A router before the two ranks."""
    async with routed(ranks, valkey, ranks=2) as rig:
        yield rig


async def test_each_rank_is_a_replica_and_its_index_is_its_cache(rig: Rig) -> None:
    """Requests go to the rank that was chosen: both compute, each one's index is its own replay, and what is predicted
    of a rank is what that rank delivers."""
    await rig.load(200)
    for replica in rig.replay_ports:
        observer = await rig.agrees(replica)
        assert observer.removals > 0
        assert observer.chains()
    assert await rig.wrong(60) == []


@pytest.mark.parametrize("first", [SERVED_NAME, ADAPTER])
async def test_an_adapter_and_its_base_share_nothing(rig: Rig, first: str) -> None:
    """Whichever comes first: the other is predicted nothing and delivered nothing; each one's second request is
    predicted what it is delivered. On one rank, or they would not meet."""
    alone, other_rank = rig.replay_ports
    rig.service.fleet.set_draining(other_rank, True)
    second = SERVED_NAME if first == ADAPTER else ADAPTER
    prompt, seen = ids(len(first), 5), []
    for model in (first, second, first, second):
        seen.append(await rig.complete(prompt, model=model))
        await rig.heard()
    assert seen == [(0, 0), (0, 0), (5 * BLOCK, 5 * BLOCK), (5 * BLOCK, 5 * BLOCK)]
    await rig.agrees(alone)


async def test_a_hybrid_is_predicted_what_all_its_groups_let_it_hit(hybrid: Engines, valkey: Valkey) -> None:
    """The index is what the full-attention group holds, hash for hash, and every prediction is what is delivered: of
    conversations that go on, of a prompt that parts from them where the other group has kept nothing, and of the next
    one that parts there, for which it has."""
    begin, seen = ids(1, 12), []
    fork = begin[: 6 * BLOCK]
    async with routed(hybrid, valkey) as rig:
        for prompt in (begin, begin, begin + ids(2, 4), begin + ids(2, 4), fork + ids(3, 4), fork + ids(4, 4)):
            seen.append(await rig.complete(prompt))
            await rig.heard()
        await rig.agrees()
        assert (await rig.events())["of_blocks"]["sparse"] > 0
    *growing, parted, parted_again = seen
    assert growing == [(blocks * BLOCK, blocks * BLOCK) for blocks in (0, 12, 12, 16)]
    assert parted == (0, 0)
    assert parted_again == (6 * BLOCK, 6 * BLOCK)


async def test_a_hybrid_that_evicts_is_predicted_exactly(hybrid: Engines, valkey: Valkey) -> None:
    """Under load that evicts blocks of both groups in any order, too."""
    async with routed(hybrid, valkey) as rig:
        await rig.load(200)
        assert (await rig.agrees()).removals > 0
        assert await rig.wrong(60) == []
