"""The contract of every index about replicas whose own events say what they hold."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Mapping

import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvroute.adapters import index as memory
from kvroute.adapters import redis_events
from kvroute.adapters.event_feed import EventFeed
from kvroute.adapters.index import Index
from kvroute.kv import promised
from kvroute.kv.chain import PrefixChain
from kvroute.kv.engine_hashes import EngineHashes
from kvroute.kv.events import decode_batch
from kvroute.kv.promised import LIFE_S, TELLING_S
from kvroute.routing.replica import ReplicaId
from tests.adapters.streams import Engine, SpokenStream
from tests.contracts.test_index import NS, R0, R1, R2, chain, holdings, settled
from tests.kv.encoded import cleared, encoded, removed, stored
from tests.redis_servers import until


def followed(index: Index, *replicas: ReplicaId, capacity: int = 1000) -> list[Engine]:
    engines = []
    for replica in replicas:
        index.join(replica, NS, capacity)
        engines.append(Engine())
        index.follow(replica, engines[-1].feed(capacity_blocks=capacity))
    return engines


async def slower(index: Index, one: PrefixChain) -> list[Mapping[ReplicaId, int]]:
    match = await index.match(NS, [one])
    return [dict(tier) for tier in match.slower[0]] if match.slower else [{}, {}]


async def test_events_say_what_is_held(index):
    """A replica holds what it says that it stored, until it says that it removed it."""
    first, second = followed(index, R0, R1)
    first.say(stored([1, 2, 3], None, [5, 6, 7], 1))
    second.say(stored([1], None, [5], 1))
    await settled(index, [{R0: 3, R1: 1}, {R0: 2, R1: 1}, {}], chain(5, 6, 7), chain(5, 6, 9), chain(9))
    first.say(removed(3), removed(2))
    second.say(stored([4], 1, [6], 1))
    await settled(index, [{R0: 1, R1: 2}], chain(5, 6, 7))


@pytest.mark.slow
async def test_what_was_sent_does_not_count_beside_events(index):
    """Sending a prompt is a promise for a short while; what stays is what the events say."""
    (engine,) = followed(index, R0)
    engine.say(stored([1], None, [5], 1))
    await settled(index, [{R0: 1}], chain(5))
    index.record(R0, chain(5, 6, 7))
    assert await holdings(index, chain(5, 6, 7), chain(8)) == [{R0: 3}, {}]
    index.record(R0, chain(8))
    index.correct(R0, chain(8), 0)
    assert await holdings(index, chain(8)) == [{}]
    await asyncio.sleep(LIFE_S)
    assert await holdings(index, chain(5, 6, 7)) == [{R0: 1}]


@pytest.mark.slow
async def test_what_was_generated_counts_until_events_can_have_come(index):
    """The blocks of an answer count at once, for the next turn may be there before the engine's events; they are not
    the engine's word, and end soon."""
    (engine,) = followed(index, R0)
    engine.say(stored([1], None, [5], 1))
    await settled(index, [{R0: 1}], chain(5))
    index.record(R0, chain(5, 6))
    index.delivered(R0, chain(5, 6), 1)
    index.answered(R0, chain(5, 6, 7))
    assert await holdings(index, chain(5, 6, 7, 8)) == [{R0: 3}]
    await asyncio.sleep(TELLING_S)
    assert await holdings(index, chain(5, 6, 7, 8)) == [{R0: 1}]


async def test_an_eviction_is_believed_at_once(index, monkeypatch):
    """Once an engine has told of all that a request computed, what it says after that is not covered by the promise."""
    monkeypatch.setattr(promised, "TELLING_S", 1000.0)
    monkeypatch.setattr(promised, "LIFE_S", 1000.0)
    (engine,) = followed(index, R0)
    engine.say(stored([1], None, [5], 1))
    await settled(index, [{R0: 1}], chain(5))
    index.record(R0, chain(5, 6))
    index.delivered(R0, chain(5, 6), 1)
    engine.say(stored([2], 1, [6], 1))
    engine.say(stored([3], None, [9], 1))
    await settled(index, [{R0: 2}, {R0: 1}], chain(5, 6), chain(9))
    engine.say(removed(2))
    await settled(index, [{R0: 1}], chain(5, 6))


@pytest.mark.slow
async def test_a_silent_replica_holds_what_it_was_sent(index):
    """Before a replica's events are first heard, what it was sent counts; afterwards what they say."""
    (engine,) = followed(index, R0)
    index.record(R0, chain(1, 2, 3))
    await settled(index, [{R0: 3}], chain(1, 2, 3))
    engine.say(stored([1], None, [5], 1))
    await asyncio.sleep(LIFE_S)
    await settled(index, [{R0: 1}, {}], chain(5), chain(1, 2, 3))


async def test_resets_and_restarts_empty_it(index):
    """After a reset, and after a restart, a replica holds only what it said since."""
    (engine,) = followed(index, R0)
    engine.say(stored([1, 2], None, [5, 6], 1))
    await settled(index, [{R0: 2}], chain(5, 6))
    engine.say(cleared(), stored([3], None, [7], 1))
    await settled(index, [{}, {R0: 1}], chain(5, 6), chain(7))
    engine.restart()
    engine.say(stored([4], None, [8], 1))
    await settled(index, [{}, {R0: 1}], chain(7), chain(8))


async def test_slower_tiers_are_given_apart(index):
    """What lies on the CPU or beyond is told apart from what the GPU holds, and counts from where that ends."""
    (engine,) = followed(index, R0)
    engine.say(stored([1, 2], None, [5, 6], 1))
    await settled(index, [{R0: 2}], chain(5, 6, 7, 8))
    assert await slower(index, chain(5, 6, 7, 8)) == [{}, {}]
    engine.say(stored([2, 3], 1, [6, 7], 1, medium="CPU"), stored([4], 3, [8], 1, medium="STORAGE"), removed(2))
    await settled(index, [{R0: 1}], chain(5, 6, 7, 8))

    async def agrees() -> bool:
        return await slower(index, chain(5, 6, 7, 8)) == [{R0: 3}, {R0: 4}]

    await until(agrees)


WINDOW = {"group_idx": 1, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 3}


async def test_hits_of_a_hybrid_end_where_all_groups_let_them(index):
    """Of a hybrid counts what lies before the deepest place where its window is there too, however far up that is; of
    another replica beside it, all that it holds."""
    first, second, plain = followed(index, R0, R1, R2)
    ids = list(range(1, 101))
    for engine in (first, second, plain):
        engine.say(stored(ids, None, ids, 1))
    first.say(stored([2, 3, 40, 41, 99, 100], None, ids, 1, **WINDOW))
    second.say(stored([1], None, [1], 1, **WINDOW))
    expected = [(100, 100), (99, 41), (41, 41), (40, 3), (3, 3), (2, 0), (1, 0)]
    chains = [chain(*ids[:n], *[999] * (110 - n)) for n, _ in expected]
    await settled(index, [{R2: n, R1: 1} | ({R0: end} if end else {}) for n, end in expected], *chains)
    first.say(removed(99, group_idx=1), removed(41, group_idx=1))
    second.say(removed(1, group_idx=1))
    await settled(index, [{R0: 3, R2: 100}], chains[0])
    first.say(cleared(), stored([1, 2], None, [1, 2], 1))
    await settled(index, [{R2: 100}], chains[0])
    first.say(stored([2, 3], 1, [2, 3], 1, **WINDOW), stored([3], 2, [3], 1))
    await settled(index, [{R0: 3, R2: 100}], chains[0])
    first.restart()
    first.say(stored([1], None, [1], 1))
    await settled(index, [{R2: 100}], chains[0])


async def test_a_hybrid_is_promised_whole_prompts(index):
    """What a hybrid was just sent counts for those that go on where the prompt could be found again, for no others."""
    first, second = followed(index, R0, R1)
    for engine in (first, second):
        engine.say(stored([1], None, [1], 1))
    first.say(stored([1], None, [1], 1, **WINDOW))
    await settled(index, [{R0: 1, R1: 1}], chain(1))
    for replica in (R0, R1):
        index.record(replica, chain(1, 2, 3, 4), 3)
    asked = chain(1, 2, 3, 4, 5), chain(1, 2, 3, 9), chain(1, 2, 9)
    assert await holdings(index, *asked) == [{R0: 3, R1: 4}, {R0: 3, R1: 3}, {R0: 1, R1: 2}]
    index.correct(R0, chain(1, 2, 3, 4), 1)
    assert await holdings(index, *asked) == [{R0: 1, R1: 4}, {R0: 1, R1: 3}, {R0: 1, R1: 2}]


async def test_a_late_follower_hears_what_was_said(index):
    """An engine that has been speaking for long is asked for what it still keeps."""
    index.join(R0, NS, 100)
    engine = Engine()
    engine.say(stored([1, 2], None, [5, 6], 1))
    engine.say(removed(2))
    index.follow(R0, engine.feed())
    await settled(index, [{R0: 1}], chain(5, 6))


async def test_a_stream_that_could_not_be_opened_is_tried_again(index, monkeypatch):
    """Where engines dial, the last listener may still have the port."""
    for module in (memory, redis_events):
        monkeypatch.setattr(module, "OPEN_AGAIN_S", 0.05)
    engine, tried = Engine(), []

    class Stream(SpokenStream):
        async def start(self) -> None:
            tried.append(self)
            if len(tried) < 3:
                raise zmq.ZMQError(errno.EADDRINUSE)
            await super().start()

    index.join(R0, NS, 100)
    index.follow(R0, EventFeed("m", 100, lambda sink, position: Stream(engine, sink, position)))
    engine.say(stored([1, 2], None, [5, 6], 1))
    await settled(index, [{R0: 2}], chain(5, 6))
    assert len(tried) == 3


async def test_leaving_ends_it(index):
    """A replica that has left holds nothing, whatever its engine says, and begins anew when it joins again."""
    (engine,) = followed(index, R0)
    engine.say(stored([1, 2], None, [5, 6], 1))
    await settled(index, [{R0: 2}], chain(5, 6))
    index.leave(R0)
    await until(lambda: not engine.listeners)
    engine.say(stored([3], None, [7], 1))
    assert await holdings(index, chain(5, 6), chain(7)) == [{}, {}]
    index.join(R0, NS, 100)
    assert await holdings(index, chain(5, 6)) == [{}]
    index.follow(R0, engine.feed())
    await settled(index, [{R0: 2}, {R0: 1}], chain(5, 6), chain(7))


async def test_suspects_are_judged_by_deliveries(index):
    """After lost events what is held is in doubt, and a delivery that fell short takes the untrue part away."""
    (engine,) = followed(index, R0)
    engine.say(stored([1, 2, 3], None, [5, 6, 7], 1))
    await settled(index, [{R0: 3}], chain(5, 6, 7))
    assert (await index.match(NS, [chain(5)])).doubts == {}
    engine.lose(removed(3), removed(2))

    async def is_doubted() -> bool:
        return (await index.match(NS, [chain(5)])).doubts == {R0: 1.0}

    await until(is_doubted)
    index.delivered(R0, chain(5, 6, 7), 1)
    await settled(index, [{R0: 1}], chain(5, 6, 7))


async def test_many_blocks_in_one_batch(index):
    """A batch larger than one call of the store arrives whole, and goes whole."""
    (engine,) = followed(index, R0, capacity=5000)
    engine.say(stored(list(range(1, 3001)), None, list(range(3000)), 1))
    await settled(index, [{R0: 3000}], chain(*range(3001)))
    engine.say(*[removed(name) for name in range(3000, 1000, -1)])
    await settled(index, [{R0: 1000}], chain(*range(3001)))


names = st.lists(st.integers(0, 2), min_size=1, max_size=5)
steps = ["store", "store", "keep", "keep", "remove", "drop", "clear"]
histories = st.lists(st.tuples(st.sampled_from(steps), names), max_size=25)


@settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck))
@given(histories)
@pytest.mark.slow
def test_any_history(opener, history):
    """However an engine's blocks come and go, in a hybrid's groups too, the index holds what a table of them says."""

    def name(ids: list[int]) -> int | None:
        return hash(tuple(ids)) & (2**64 - 1) if ids else None

    async def scenario() -> None:
        async with opener() as index:
            (engine,) = followed(index, R0)
            plain = EngineHashes("m", 1000)
            engine.say(cleared())
            for what, ids in history:
                place = [name(ids)], name(ids[:-1]), ids[-1:], 1
                event = {"store": stored(*place), "keep": stored(*place, **WINDOW), "remove": removed(name(ids))}
                said = (event | {"drop": removed(name(ids), group_idx=1)}).get(what, cleared())
                plain.apply(decode_batch(encoded([said])))
                engine.say(said)
            asked = [chain(*ids) for _, ids in history]
            await settled(index, [{R0: n} if (n := plain.reusable(one)) else {} for one in asked], *asked)

    asyncio.run(scenario())
