"""The owner's replay of a replica's log, against senders that write at any moment."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.adapters.redis_owner import Owner, Write, corrected, log_id, part_of, sent
from kvroute.kv.chain import PrefixChain, blocks_in, chain_of, hashes_of, root_of, tokens_of
from kvroute.kv.residency import Residency, Run


def chain(*tokens: int) -> PrefixChain:
    return chain_of(tokens_of(tokens), 1, root_of("m"))


class Shelf:
    """What Redis holds of one replica: the bits, and the log."""

    def __init__(self) -> None:
        self.bits: set[int] = set()
        self.log: list[tuple[bytes, bytes]] = []

    def write(self, writes: list[Write], record: bytes | None = None) -> bytes:
        for write in writes:
            hashes = set(memoryview(write.run.blocks).cast("Q"))
            self.bits = self.bits | hashes if write.op == b"+" else self.bits - hashes
        if record is not None:
            self.log.append((b"1-%d" % (len(self.log) + 1), record))
        return self.log[-1][0] if self.log else b"0-0"

    def after(self, id: tuple[int, int]) -> list[tuple[bytes, bytes]]:
        return [entry for entry in self.log if log_id(entry[0]) > id]


def send(shelf: Shelf, shadow: Residency, kind: str, link: PrefixChain, held: int) -> None:
    """Do what a router does when it places a chain, or learns that less of it was held."""
    if kind == "send":
        change = shadow.record(link)
        shelf.write([Write(b"+", change.stored)] if change.stored else [], sent(link, change.held))
    elif held < blocks_in(link):
        shadow.correct(link, held)
        shelf.write([Write(b"-", part_of(link, held))], corrected(link, held))


chains = st.builds(
    lambda n, tail: chain(*range(n), *tail), st.integers(0, 30), st.lists(st.integers(0, 2), min_size=1, max_size=25)
)
deeds = st.sampled_from(["send", "send", "send", "correct", "read", "execute", "takeover"])
steps = st.lists(
    st.tuples(
        st.sampled_from(["send", "send", "send", "correct", "read", "execute", "takeover"]), st.integers(0, 1), chains
    ),
    max_size=30,
)


@given(steps, st.integers(1, 60))
@settings(max_examples=400, deadline=None)
def test_bits_become_what_the_log_says(steps, capacity):
    """However sends, clearing and takeovers interleave, in the end the bits are what the owner's model holds."""
    shelf, shadows = Shelf(), (Residency(capacity), Residency(capacity))
    owner, waiting, saved = Owner(capacity), None, None
    for kind, router, link in [*steps, ("execute", 0, b""), ("read", 0, b""), ("execute", 0, b""), ("read", 0, b"")]:
        if kind in ("send", "correct"):
            send(shelf, shadows[router], kind, link, len(link) // 16)
        elif kind == "read" and waiting is None:
            waiting = owner.replay(shelf.after(owner.last_id))
        elif kind == "execute" and waiting is not None:
            if waiting:
                owner.cleared(shelf.write(waiting))
            waiting = None
            last_id, packed = owner.snapshot()
            saved = f"{last_id} ".encode() + packed if router else saved
        elif kind == "takeover":
            owner, waiting = Owner(capacity, saved, shelf.write([])), None
    if waiting:
        owner.cleared(shelf.write(waiting))
    while entries := shelf.after(owner.last_id):
        owner.cleared(shelf.write(owner.replay(entries)))
    assert shelf.bits == {h for link, _ in owner.residency.chains() for h in hashes_of(link)}
    assert len(shelf.bits) <= capacity


def test_what_was_sent_while_it_was_cleared_is_written_again():
    """A chain sent after the decision to clear it, and before the clearing, is there in the end."""
    shelf, shadow = Shelf(), Residency(100)
    owner = Owner(4)
    for link in (chain(1, 2, 3), chain(7, 8, 9)):
        send(shelf, shadow, "send", link, 0)
    writes = owner.replay(shelf.after(owner.last_id))
    send(shelf, shadow, "send", chain(1, 2, 3), 0)
    owner.cleared(shelf.write(writes))
    owner.cleared(shelf.write(owner.replay(shelf.after(owner.last_id))))
    assert set(hashes_of(chain(1, 2, 3))) <= shelf.bits


def test_a_snapshot_of_another_capacity_is_not_used():
    """An owner whose replica has another capacity than the snapshot's starts from the log alone."""
    owner = Owner(4)
    owner.replay([(b"5-1", sent(chain(1, 2), 0))])
    last_id, packed = owner.snapshot()
    stored = f"{last_id} ".encode() + packed
    assert (len(Owner(4, stored).residency), Owner(4, stored).last_id) == (2, (5, 1))
    assert (len(Owner(5, stored).residency), Owner(5, stored).last_id) == (0, (0, 0))


def test_part_of_a_chain_begins_at_a_group():
    """A part of a chain is given from the start of its group, so that the index finds the bucket."""
    link = chain(*range(40))
    assert part_of(link, 18, 35) == Run(2, link[8 * 16 : 8 * 35])
    assert part_of(link, 32) == Run(0, link[8 * 32 :])
