"""Laws of chains."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvroute.kv.chain import (
    HASH_BYTES,
    Grown,
    Root,
    TokenBytes,
    blocks_in,
    chain_of,
    extend,
    grow,
    hashes_of,
    root_of,
    tokens_of,
)

ids = st.lists(st.integers(0, 2**32 - 1), max_size=200).map(tokens_of)
block_sizes = st.integers(1, 64)
roots = st.integers(0, 2**64 - 1).map(Root)
names = st.text(max_size=5) | st.none()
triples = st.tuples(st.text(max_size=5), names, names)


@given(ids, ids, block_sizes, roots)
def test_the_chain_of_a_prefix_is_the_prefix_of_the_chain(start, rest, block_size, root):
    """Whatever follows a prompt, the hashes of its own whole blocks stay."""
    chain = chain_of(start, block_size, root)
    assert chain_of(TokenBytes(start + rest), block_size, root)[: len(chain)] == chain


@given(ids, st.integers(0, 200), block_sizes, roots)
def test_a_chain_does_not_depend_on_where_it_was_continued(tokens, blocks, block_size, root):
    """Hashing on from any block's hash gives the same chain as hashing at once."""
    at = min(blocks, len(tokens) // 4 // block_size)
    start = extend(root, tokens[: at * block_size * 4], block_size)
    parent = int.from_bytes(start[-HASH_BYTES:], "little") if start else root
    assert start + extend(parent, tokens[at * block_size * 4 :], block_size) == chain_of(tokens, block_size, root)


@given(triples, triples, ids, block_sizes)
def test_another_model_adapter_or_salt_shares_no_block(one, other, tokens, block_size):
    """Equal tokens under different cache keys have no hash in common, whatever separators the names contain."""
    a, b = (set(hashes_of(chain_of(tokens, block_size, root_of(*fields)))) for fields in (one, other))
    assert (a & b == set()) == (one != other or not a)


@given(ids, block_sizes, roots)
def test_only_whole_blocks_are_hashed(tokens, block_size, root):
    """A chain has one hash for each whole block and nothing for the rest."""
    assert blocks_in(chain_of(tokens, block_size, root)) == len(tokens) // 4 // block_size


@given(ids, st.integers(0, 199), block_sizes, roots)
def test_a_changed_token_changes_its_block_and_all_behind_it(tokens, at, block_size, root):
    """Two prompts share exactly the blocks before the first token in which they differ."""
    values = array("I", tokens)
    if at >= len(values):
        return
    values[at] ^= 1
    pairs = zip(
        hashes_of(chain_of(tokens, block_size, root)),
        hashes_of(chain_of(TokenBytes(values.tobytes()), block_size, root)),
        strict=True,
    )
    assert [a == b for a, b in pairs] == [n < at // block_size for n in range(len(values) // block_size)]


def test_hashes_stay_what_they_are():
    """Routers of different versions share an index as long as HASH_VERSION is the same."""
    chain = chain_of(tokens_of(range(40)), 16, root_of("m", "lora", "salt"))
    assert list(hashes_of(chain)) == [11124418276290563845, 5422818427937160520]


def test_a_token_id_outside_of_32_bits_is_refused():
    """Ids that cannot be packed are an error, not another id."""
    with pytest.raises(OverflowError):
        tokens_of([2**32])


@given(st.lists(st.lists(st.integers(0, 2**32 - 1), max_size=40), max_size=6), st.integers(1, 9))
def test_growing_equals_hashing_at_once(parts, block_size):
    """However tokens are split into parts, growing by them gives the chain, the tail and the count of the whole."""
    grown, root = Grown(), Root(3)
    for part in parts:
        grown = grow(grown, tokens_of(part), block_size, root)
    whole = tokens_of([token for part in parts for token in part])
    assert grown.chain == chain_of(whole, block_size, root)
    assert grown.tail == whole[len(whole) // 4 // block_size * block_size * 4 :]
    assert grown.tokens == len(whole) // 4
