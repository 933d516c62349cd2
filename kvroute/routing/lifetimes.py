"""What the requests that run on a replica will hold together when they hold most.

Each grows by a token a step for each of its sequences and leaves with all that it holds; but they do not all end at the
same moment. The sum of what each holds at its end is more than there ever is at one time, unless they began together:

    peak = most over the moments at which one ends, of what those that run until then hold by then

(the "future" half of the Past-Future scheduler, Gong et al., ASPLOS '25). How long one still runs follows from what
answers usually come to, from how far it is, and from how much lengths were seen to differ: so much is added to what is
still expected, so that where lengths are anybody's guess the sum of what each holds at its end is the smaller one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct


class Life(Struct, frozen=True):
    """A running request."""

    held_tokens: float  # now, of its own
    sequences: int
    steps: float  # to come


def life_of(kv_tokens: float, output_tokens: float, sequences: int, steps_done: float, spread: float) -> Life:
    """Return what is known of a request that will hold `kv_tokens` at its expected end."""
    steps = output_tokens / sequences
    to_come = max(steps - steps_done, 0.0)
    return Life(kv_tokens - sequences * to_come, sequences, to_come + spread * steps)


def ends_of(lives: Iterable[Life]) -> list[tuple[float, float, int]]:
    """Return, for the moment of each end, the last one first: steps until then, what is held then, and by how many."""
    found, held, sequences = [], 0.0, 0
    for life in sorted(lives, key=lambda life: -life.steps):
        held += life.held_tokens
        sequences += life.sequences
        found.append((life.steps, held + sequences * life.steps, sequences))
    return found


def peak_with(ends: Sequence[tuple[float, float, int]], new: Life) -> float:
    """Return the most that is held at a time if one more begins now."""
    most = others = 0.0
    for steps, held, sequences in ends:
        if steps > new.steps:
            most, others = max(most, held), held - sequences * (steps - new.steps)
        else:
            most = max(most, held + new.held_tokens + new.sequences * steps)
    return max(most, others + new.held_tokens + new.sequences * new.steps)
