"""What routers know of caches."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.chain import PrefixChain, hashes_of
from kvroute.kv.pool import BlockPool, Cleared, Removed, Stored
from kvroute.sim.simulation_knowledge import ExactView, History, Holders, SentView
from kvroute.sim.simulation_routers import id_of
from kvroute.sim.workload import Story

IDS = [id_of(n) for n in range(3)]


def chain(*keys, tokens=64):
    """Return four blocks of 16 tokens for each key."""
    story = Story(16)
    for key in keys:
        story.tell(key, tokens)
    return PrefixChain(story.chain)


def stored(chain):
    return [Stored(tuple(hashes_of(chain)), None)]


def exact():
    view = ExactView(IDS)
    for number in range(3):
        view.join(number, 100)
    return view


def test_one_walk_finds_the_depth_of_every_replica():
    """Each replica's holding ends where its first block is missing."""
    view = exact()
    view.happened(0, stored(chain("a", "b")))
    view.happened(1, stored(chain("a")))
    assert view.holding(chain("a", "b", "c")) == {"r0": 8, "r1": 4}
    assert view.holding(chain("x")) == {}
    assert view.holding(PrefixChain(b"")) == {}


def test_a_removed_block_ends_a_holding_until_its_last_copy_is_gone():
    """A block that an engine has twice is there until it was removed twice."""
    view, blocks = exact(), chain("a")
    view.happened(0, stored(blocks) + stored(blocks))
    second = hashes_of(blocks)[1]
    view.happened(0, [Removed(second)])
    assert view.holding(blocks) == {"r0": 4}
    view.happened(0, [Removed(second)])
    assert view.holding(blocks) == {"r0": 1}
    view.happened(0, [Cleared()])
    assert view.holding(blocks) == {}


def test_what_is_on_its_way_counts_until_it_is_told_of():
    """A prompt that was sent is held at once; when it is computed or failed, only events count."""
    view, blocks = exact(), chain("a")
    view.sent(2, blocks, 0)
    assert view.holding(blocks) == {"r2": 4}
    view.happened(2, stored(blocks))
    view.answered(2, blocks, 0, blocks)
    assert view.holding(blocks) == {"r2": 4}
    view.sent(1, blocks, 0)
    view.failed(1, blocks, 0)
    assert view.holding(blocks) == {"r2": 4}


def test_a_new_replica_holds_nothing():
    """Joining forgets what a replica of that number had."""
    for view in (exact(), SentView(IDS)):
        view.join(0, 100)
        view.sent(0, chain("a"), 0)
        assert view.holding(chain("a")) == {"r0": 4}
        view.join(0, 100)
        assert view.holding(chain("a")) == {}


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.integers(1, 6)), max_size=40))
def test_events_tell_what_an_engines_pool_holds(uses):
    """After any uses of a small pool, the view and the pool agree on every prompt."""
    pool, view = BlockPool(9, 16), ExactView(IDS)
    for key, blocks in uses:
        used = PrefixChain(chain(key, key)[: blocks * 8])
        hits = pool.match(used, blocks * 16)
        pool.touch(hits)
        taken = hits + pool.take(blocks - len(hits))
        pool.store(used, taken, len(hits), blocks)
        pool.release(taken)
        view.happened(1, pool.drain())
        for name in "abcd":
            asked = chain(name, name)
            assert view.holding(asked).get("r1", 0) == len(pool.match(asked, 1000))


def test_what_was_sent_is_forgotten_as_an_engine_would():
    """Without events the view is bounded by the replica's capacity, the least recently used going first."""
    view = SentView(IDS)
    view.join(0, 8)
    for key in "abc":
        view.sent(0, chain(key), 0)
        view.answered(0, chain(key), 0, chain(key))
    assert [view.holding(chain(key)) for key in "abc"] == [{}, {"r0": 4}, {"r0": 4}]
    view.failed(0, chain("c"), 1)
    view.happened(0, stored(chain("a")))
    assert (view.holding(chain("c")), view.holding(chain("a"))) == ({"r0": 1}, {})


def test_holders_forget_without_a_trace():
    """What was added and removed again leaves nothing behind."""
    holders = Holders()
    holders.add(1, [5, 5, 6])
    holders.add(2, [5])
    holders.remove(1, [5, 5, 6, 9])
    assert holders.masks == {5: 2}
    holders.forget(2)
    assert holders.masks == {}


def test_history_counts_what_was_there_before():
    """A prompt could have hit its own former turns, answers included, and not more than itself."""
    history = History(1000)
    assert history.see(chain("a"), chain("a", "answer")) == 0
    assert history.see(chain("a", "answer"), chain("a", "answer", "more")) == 8
    assert history.see(chain("a"), chain("a")) == 4


def test_history_is_bounded_in_requests():
    """A generation that is full becomes the old one: what was used within the last two is remembered, no more."""
    history = History(1000, limit_requests=3)
    history.see(chain("a"), chain("a"))
    for key in "bcd":
        history.see(chain(key), chain(key))
    assert history.see(chain("a"), chain("a")) == 4
    for key in "efghij":
        history.see(chain(key), chain(key))
    assert history.see(chain("a"), chain("a")) == 0
