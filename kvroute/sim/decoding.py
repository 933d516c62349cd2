"""The sequences that decode: counted together, and each looked at only in the steps in which it needs more.

Each computes one token in every step that leaves it in, so together they are a number and a sum. A heap says in which
step one of them needs a block, fills one that has a hash, or gets its last token.
"""

from __future__ import annotations

from heapq import heappop, heappush

from kvroute.sim.sequence import Sequence


class Decoding:
    """Sequences that compute one token in each step."""

    def __init__(self, block_size: int) -> None:
        self.count = 0
        self.youngest = 0  # no sequence that ever decoded has a larger number
        self._block_size = block_size
        self._offsets = 0  # sum of theirs
        self._due: list[tuple[int, int, int, Sequence]] = []  # heap of (step, number, ticket)
        self._tickets = 0

    def enter(self, sequence: Sequence, step: int) -> None:
        """Count a sequence in: it decodes from the step after `step` on."""
        self.count += 1
        self._offsets += sequence.offset
        self.youngest = max(self.youngest, sequence.number)
        self.wait(sequence, step)

    def leave(self, sequence: Sequence) -> None:
        """Count a sequence out."""
        self.count -= 1
        self._offsets -= sequence.offset
        sequence.ticket = 0

    def pause(self, sequence: Sequence, step: int) -> None:
        """Leave a sequence out of a step."""
        sequence.pause()
        self._offsets -= 1
        self.wait(sequence, step)

    def wait(self, sequence: Sequence, step: int) -> None:
        """Note when a sequence has to be looked at after `step`; what was noted before is void."""
        self._tickets += 1
        sequence.ticket = self._tickets
        sequence.due = sequence.plan(step, self._block_size)
        heappush(self._due, (sequence.due, sequence.number, sequence.ticket, sequence))

    def take_due(self, step: int) -> list[Sequence]:
        """Return the sequences that have to be looked at in this step, in the order of their admission."""
        due = []
        heap = self._due
        while heap and heap[0][0] <= step:
            _, _, ticket, sequence = heappop(heap)
            if ticket == sequence.ticket:
                due.append(sequence)
        return due

    def next_due(self) -> int:
        """Return the next step in which one has to be looked at. There must be one."""
        while self._due[0][2] != self._due[0][3].ticket:
            heappop(self._due)
        return self._due[0][0]

    def kv_tokens(self, step: int) -> int:
        """Tokens in the cache of all of them once the step is over."""
        return self._offsets + self.count * step

    def __repr__(self) -> str:
        return f"<Decoding {self.count} sequences>"
