"""The contract of every index: in memory, in Redis, in a Redis cluster. The same tests, the same answers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.adapters.index import Index, Namespace, namespace_of
from kvroute.kv.chain import PrefixChain, blocks_in, chain_of, root_of, tokens_of
from kvroute.kv.residency import Residency
from kvroute.routing.replica import ReplicaId
from tests.redis_servers import until

NS, OTHER = Namespace("model.1"), Namespace("model.2")
R0, R1, R2 = (ReplicaId(f"http://r{i}:8000") for i in range(3))


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


async def holdings(index: Index, *chains: PrefixChain, namespace: Namespace = NS) -> list[dict[ReplicaId, int]]:
    return [dict(holding) for holding in (await index.match(namespace, chains)).holdings]


async def settled(index: Index, expected: Sequence[Mapping[ReplicaId, int]], *chains: PrefixChain) -> None:
    """Wait for what is done in the background: evictions, and the end of a replica's old life."""

    async def agrees() -> bool:
        return await holdings(index, *chains) == list(expected)

    await until(agrees)


async def test_nobody_holds_what_nobody_was_sent(index):
    """A chain that was never recorded is held by nobody, and neither is the empty chain."""
    index.join(R0, NS, 100)
    assert await holdings(index, chain(1, 2, 3), PrefixChain(b"")) == [{}, {}]
    assert await holdings(index, chain(1), namespace=OTHER) == [{}]


async def test_depths_are_leading_blocks(index):
    """Each replica holds as many leading blocks as the longest chain recorded for it shares with the one asked for."""
    for replica in (R0, R1, R2):
        index.join(replica, NS, 1000)
    index.record(R0, chain(*range(100)))
    index.record(R1, chain(*range(40)))
    index.record(R1, chain(*range(20), 7, 7, 7))
    asked = (chain(*range(200)), chain(*range(20), 7, 7, 8), chain(5), chain(*range(10)))
    assert await holdings(index, *asked) == [{R0: 100, R1: 40}, {R0: 20, R1: 22}, {}, {R0: 10, R1: 10}]


async def test_namespaces_do_not_mix(index):
    """What was recorded under one namespace is not found under another."""
    index.join(R0, NS, 100)
    index.join(R1, OTHER, 100)
    index.record(R0, chain(1, 2, 3))
    index.record(R1, chain(1, 2))
    assert await holdings(index, chain(1, 2, 3)) == [{R0: 3}]
    assert await holdings(index, chain(1, 2, 3), namespace=OTHER) == [{R1: 2}]


async def test_strangers_and_leavers_hold_nothing(index):
    """Records for a replica that has not joined, or has left, change nothing; others keep what they hold."""
    index.join(R0, NS, 100)
    index.join(R1, NS, 100)
    for replica in (R0, R1, R2):
        index.record(replica, chain(1, 2, 3))
    index.leave(R0)
    index.leave(R2)
    index.record(R0, chain(1, 2, 3))
    assert await holdings(index, chain(1, 2, 3)) == [{R1: 3}]


async def test_a_new_life_begins_empty(index):
    """A replica that left and joined again holds nothing of its old life, and then only what it was sent in the new."""
    index.join(R0, NS, 100)
    index.record(R0, chain(1, 2, 3))
    await settled(index, [{R0: 3}], chain(1, 2, 3))
    index.leave(R0)
    index.join(R0, NS, 100)
    assert await holdings(index, chain(1, 2, 3)) == [{}]
    index.record(R0, chain(1, 9))
    assert await holdings(index, chain(1, 2, 3), chain(1, 9)) == [{R0: 1}, {R0: 2}]
    await asyncio.sleep(0.3)
    assert await holdings(index, chain(1, 2, 3), chain(1, 9)) == [{R0: 1}, {R0: 2}]


@pytest.mark.parametrize(("capacity", "namespace", "held"), [(100, NS, 3), (99, NS, 0), (100, OTHER, 0)])
async def test_joining_again(index, capacity, namespace, held):
    """Joining with the same values changes nothing; with another capacity or namespace it begins a new life."""
    index.join(R0, NS, 100)
    index.record(R0, chain(1, 2, 3))
    await settled(index, [{R0: 3}], chain(1, 2, 3))
    index.join(R0, namespace, capacity)
    expected = {R0: held} if held else {}
    assert await holdings(index, chain(1, 2, 3), namespace=namespace) == [expected]
    assert await holdings(index, chain(1, 2, 3), namespace=OTHER if namespace == NS else NS) == [{}]


async def test_correction_takes_back_what_was_claimed(index):
    """After a correction the replica holds that many blocks of the chain, and nothing below them on any branch."""
    index.join(R0, NS, 100)
    index.join(R1, NS, 100)
    long, branch = chain(*range(50)), chain(*range(30), 99, 98)
    for replica in (R0, R1):
        index.record(replica, long)
        index.record(replica, branch)
    index.correct(R0, long, 20)
    await settled(index, [{R0: 20, R1: 50}, {R0: 20, R1: 32}], long, branch)
    index.correct(R1, long, 50)
    index.correct(R1, long, 70)
    index.correct(R0, long, 0)
    await settled(index, [{R1: 50}, {R1: 32}], long, branch)
    index.record(R0, branch)
    await settled(index, [{R0: 30, R1: 50}, {R0: 32, R1: 32}], long, branch)


async def test_capacity_bounds_what_a_replica_holds(index):
    """A replica never holds more blocks than its capacity for long, and loses the oldest chain first, tail first."""
    index.join(R0, NS, 100)
    chains = [chain(k, *range(40)) for k in range(6)]
    for one in chains:
        index.record(R0, one)
    await settled(index, [{}, {}, {}, {R0: 18}, {R0: 41}, {R0: 41}], *chains)
    index.record(R0, chains[3])
    await settled(index, [{}, {}, {}, {R0: 41}, {R0: 18}, {R0: 41}], *chains)


async def test_a_chain_longer_than_the_cache(index):
    """Of a chain longer than the whole cache the replica holds the capacity's worth of leading blocks."""
    index.join(R0, NS, 300)
    index.record(R0, chain(*range(1000)))
    await settled(index, [{R0: 300}], chain(*range(1000)))


async def test_many_depths_of_one_chain(index):
    """With many holders the deepest are exact and the others are at most 1/64 of the chain too low, never too high."""
    replicas = [ReplicaId(f"http://many{i}:8000") for i in range(40)]
    long = chain(*range(2000))
    depths = {replica: 1 + 47 * i for i, replica in enumerate(replicas)}
    for replica, depth in depths.items():
        index.join(replica, NS, 4000)
        index.record(replica, PrefixChain(long[: 8 * depth]))

    async def close_enough() -> bool:
        (found,) = await holdings(index, long)
        assert all(found[replica] <= depths[replica] for replica in found)
        near = len(found) == 40 and all(depths[replica] - found[replica] <= 32 for replica in replicas)
        return near and all(found[replica] == depths[replica] for replica in replicas[-8:])

    await until(close_enough)


def test_namespaces_are_unambiguous():
    """Whatever differs in model, block size or fingerprint has another namespace, safe within a Redis key."""
    names = {
        namespace_of(*f) for f in [("a", 16, "x"), ("a", 1, "6x"), ("a1", 6, "x"), ("a", 16, "y"), ("a/{b}", 16, "x")]
    }
    assert len(names) == 5
    assert all(not set("{}: ") & set(name) for name in names)


tokens = st.lists(st.integers(0, 2), max_size=70)
trunk = st.builds(lambda n, tail: [0] * n + tail, st.integers(0, 60), tokens)
deeds = st.sampled_from(["record", "record", "record", "correct", "leave"])
steps = st.lists(st.tuples(deeds, st.integers(0, 2), trunk, st.integers(0, 70)), max_size=12)


@given(steps=steps, capacity=st.integers(1, 120))
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@pytest.mark.slow
def test_agrees_with_the_model_of_each_replica(opener, steps, capacity):
    """After any sequence of records, corrections and restarts, every depth is the one that a Residency gives."""

    async def scenario() -> None:
        async with opener() as index:
            models: dict[ReplicaId, Residency] = {}
            for replica in (R0, R1, R2):
                index.join(replica, NS, capacity)
                models[replica] = Residency(capacity)
            for what, number, ids, held in steps:
                replica, link = (R0, R1, R2)[number], chain(*ids)
                if what == "record":
                    index.record(replica, link)
                    models[replica].record(link)
                elif what == "correct":
                    index.correct(replica, link, held)
                    models[replica].correct(link, min(held, blocks_in(link)))
                else:
                    index.leave(replica)
                    index.join(replica, NS, capacity)
                    models[replica] = Residency(capacity)
            asked = [chain(*ids) for _, _, ids, _ in steps]
            expected = [{r: n for r, m in models.items() if (n := m.held(link))} for link in asked]
            await settled(index, expected, *asked)

    asyncio.run(scenario())
