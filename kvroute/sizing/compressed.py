"""What a layer of compressed attention keeps (DeepSeek V4): a window, older tokens several to a vector, and its work.

    window      one vector for each of the last tokens
    compressed  one vector for every few tokens (with an indexer that chooses among them) or for every many
    work        inputs and scores of the tokens that are not compressed yet, in 32 bits; few ratios overlap, and keep
                twice as many of twice the width

Keys and values are one vector for all heads, repeated on every GPU. Layouts are those of vLLM (`deepseek_v4`:
attention.py, compressor.py): in 8 bits a vector keeps its rotary part in 16 bits and a scale byte for 64 numbers.
"""

from __future__ import annotations

from kvroute.sizing.fields import Fields
from kvroute.sizing.layers import Latent, Layer, State
from kvroute.sizing.patterns import Kind

SCALED, ALIGNED = 64, 8  # numbers that share a scale byte; scale bytes are filled up to a multiple of this


def index_bytes(dim: int) -> int:
    """Bytes of an indexer's key of `dim` numbers: 8 bits each, and a 4-byte scale for 128 of them."""
    return dim + -(-dim // 128) * 4


def compressed_layer(fields: Fields, kind: Kind) -> Layer:
    """Describe one layer.

    Raises:
        ConfigError: a field that is needed for it is missing.
    """
    dim, rope = fields.needed("head_dim"), fields.needed("qk_rope_head_dim")
    if rope > dim:
        raise fields.wrong("qk_rope_head_dim", f"is {rope}, more than head_dim {dim}")
    scales = -(-(dim - rope) // SCALED)
    packed = dim - rope + 2 * rope + -(-scales // ALIGNED) * ALIGNED
    window = Latent(dim, 0, eight_bit_bytes=packed, window=kind.window)
    ratio = kind.compressed
    if not ratio:
        return (window,)
    index = fields.needed("index_head_dim") if kind.indexed else 0
    older = Latent(
        dim,
        0,
        index_bytes(index) if index else 0,
        eight_bit_bytes=packed,
        stride=ratio,
        chosen=fields.needed("index_topk") if index else None,
        index_numbers=index * fields.needed("index_n_heads") if index else 0,
    )
    overlap = 2 if kind.indexed else 1
    numbers = overlap * ratio * 2 * overlap * (dim + index)  # of inputs and scores
    return window, older, State(heads=1, head_numbers=numbers, state_element_bytes=4, repeated=True)
