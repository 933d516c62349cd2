"""Token ids -> the chain of block hashes that names every prefix of a prompt.

Rule 1. A hash covers its block and, through its parent, every block before it: equal hashes mean equal prefixes.
Rule 2. Only whole blocks are hashed. A chain of a prefix is a prefix of the chain.
Rule 3. What separates caches inside an engine (model, adapter, salt) is in the root, so it reaches every block.

The hash is xxh3-64 with the parent as its seed. It need not equal the engine's own hash: engines' hashes are opaque to
us, ours only have to be equal where theirs are. This file does not know where token ids come from.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from struct import iter_unpack
from typing import NewType

from msgspec import Struct
from xxhash import xxh3_64_intdigest

BlockHash = NewType("BlockHash", int)  # unsigned 64 bit, covers every token up to the end of its block
PrefixChain = NewType("PrefixChain", bytes)  # block hashes, root first, 8 bytes little-endian each
TokenBytes = NewType("TokenBytes", bytes)  # token ids, 4 bytes little-endian each
Root = NewType("Root", int)  # seed of a chain's first block

HASH_VERSION = 1  # part of every index namespace: routers that hash differently must not share entries
TOKEN_BYTES = 4
HASH_BYTES = 8


def root_of(model: str, lora: str | None = None, cache_salt: str | None = None) -> Root:
    """Return the seed of the first block. Fields are length-prefixed, so no two triples can be confused."""
    parts = [b"kvroute"]
    for field in (model, lora, cache_salt):
        data = b"" if field is None else field.encode("utf-8", "surrogatepass")
        parts.append(b"-" if field is None else b"%d:" % len(data))
        parts.append(data)
    return Root(xxh3_64_intdigest(b"".join(parts)))


def chain_of(ids: TokenBytes, block_size: int, root: Root) -> PrefixChain:
    """Hash the whole blocks of `ids` (block_size tokens each); what is left over belongs to no block yet."""
    return PrefixChain(extend(root, ids, block_size))


class Grown(Struct, frozen=True):
    """A beginning of a prompt: the chain of its whole blocks, and the tokens that do not fill a block yet."""

    chain: PrefixChain = PrefixChain(b"")
    tail: TokenBytes = TokenBytes(b"")
    tokens: int = 0  # all of them


def grow(start: Grown, ids: bytes, block_size: int, root: Root) -> Grown:
    """Add tokens to a beginning that was made with the same block size and root; only what is new is hashed."""
    waiting = start.tail + ids
    tokens = start.tokens + len(ids) // TOKEN_BYTES
    if len(waiting) < block_size * TOKEN_BYTES:  # no new block: nothing to hash, and a long chain is not copied
        return Grown(start.chain, TokenBytes(waiting), tokens)
    parent = int.from_bytes(start.chain[-HASH_BYTES:], "little") if start.chain else root
    hashes = extend(parent, waiting, block_size)
    hashed_bytes = len(hashes) // HASH_BYTES * block_size * TOKEN_BYTES
    return Grown(
        chain=PrefixChain(start.chain + hashes),
        tail=TokenBytes(waiting[hashed_bytes:]),
        tokens=tokens,
    )


def extend(parent: int, ids: bytes, block_size: int) -> bytes:
    """Hash the whole blocks of `ids` that follow the block (or root) whose hash is `parent`."""
    width = block_size * TOKEN_BYTES
    blocks = iter_unpack(f"{width}s", memoryview(ids)[: len(ids) // width * width])  # half the time of slicing
    return array("Q", [parent := xxh3_64_intdigest(block, parent) for (block,) in blocks]).tobytes()


def blocks_in(chain: PrefixChain) -> int:
    """Return the number of whole blocks in a chain."""
    return len(chain) // HASH_BYTES


def hashes_of(chain: PrefixChain) -> memoryview:
    """View a chain as a sequence of unsigned 64-bit integers, without copying."""
    return memoryview(chain).cast("Q")


def tokens_of(ids: Iterable[int]) -> TokenBytes:
    """Pack token ids, each from 0 to 2**32 - 1.

    Raises:
        OverflowError: an id is outside that range.
    """
    return TokenBytes(array("I", ids).tobytes())
