"""What the fields of stored blocks mean: which groups promise hits, which tier a medium is, which chains they name.

Keys are those of vLLM's `BlockStored.extra_keys` (`to_event_extra_keys`, v1/core/kv_cache_utils.py), in order: adapter,
media items as (identifier, offset), salt in a chain's first block, digest of prompt embeddings.
"""

from __future__ import annotations

from kvroute.kv.block_tree import TIERS
from kvroute.kv.events import BlocksStored

INDEXED_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})  # every block of a chain stays
GROUPS_MAX = 64  # of one engine, of each kind: models have a dozen at most, and an engine may say anything


def tier_of(medium: str | None) -> int:
    """Return the number of a tier by the name that events give it."""
    if medium is None:
        return 0
    name = medium.upper()
    return TIERS.index(name) if name in TIERS else len(TIERS) - 1


def is_sparse(event: BlocksStored) -> bool:
    """Whether an event says that its group drops blocks while later ones stay."""
    return event.kind is not None and event.kind not in INDEXED_KINDS


def read_keys(event: BlocksStored) -> tuple[str | None, int]:
    """Return the salt of a chain that begins here, and how many of the event's blocks a chain of ours can name."""
    keys, count = event.extra_keys, len(event.hashes)
    if event.is_lora_unnamed:
        return None, 0
    if keys is None:
        return None, count
    if len(keys) != count:
        return None, 0
    salt = None
    for number, own_keys in enumerate(keys):
        if not own_keys:
            continue
        if not isinstance(own_keys, list):
            return salt, number
        rest = own_keys[1:] if event.lora_name is not None and own_keys[0] == event.lora_name else own_keys
        if len(rest) == 1 and isinstance(rest[0], str) and number == 0 and event.parent is None:
            salt = rest[0]
        elif rest:
            return salt, number
    return salt, count
