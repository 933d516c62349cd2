"""What one layer keeps in memory for a conversation: the three forms that caches take.

    Attention   keys and values of every head, for all tokens, for a window, or for the current chunk
    Latent      one compressed vector a token, or for several, shared by all heads (multi-head latent attention)
    State       a fixed amount a sequence, whatever its length (Mamba, linear attention, short convolutions)

A layer may keep several (parallel attention and Mamba), or none (feed-forward only, or reading another layer's cache).
Query heads appear nowhere: only keys and values are kept. This file knows bytes, not models, engines or hardware.
"""

from __future__ import annotations

from msgspec import Struct


class Attention(Struct, frozen=True, tag=True):
    """Keys and values as plain heads. At most one of `window` and `chunk` is set; neither means every token is kept."""

    kv_heads: int
    key_dim: int  # numbers a head keeps for the key of one token
    value_dim: int
    window: int | None = None  # tokens that are still attended to, the newest included
    chunk: int | None = None  # tokens of one chunk of chunked local attention
    sink: int = 0  # first tokens kept beside the window (StreamingLLM)

    stride = 1  # tokens that one entry of the cache stands for

    @property
    def is_bounded(self) -> bool:
        """Whether a long conversation stops growing here."""
        return self.window is not None or self.chunk is not None

    def bytes_per_token(self, element_bytes: int, tp: int = 1) -> int:
        """Bytes of one token on one of `tp` GPUs. Past tp = KV heads each further GPU repeats a head."""
        return max(1, self.kv_heads // tp) * (self.key_dim + self.value_dim) * element_bytes

    def tokens_kept(self, tokens: int) -> int:
        """Tokens that this layer must keep of a conversation of `tokens`. A chunk is counted at its fullest."""
        if self.window is not None:
            return min(tokens, self.sink + self.window)
        return tokens if self.chunk is None else min(tokens, self.chunk)

    def fixed_bytes(self, tp: int = 1) -> int:
        """Bytes that do not depend on length: none."""
        return 0


class Latent(Struct, frozen=True, tag=True):
    """Multi-head latent attention: one vector for all heads, so tensor parallelism repeats it on every GPU.

    A vector stands for one token, or in compressed attention (DeepSeek V4) for `stride` of them.
    """

    rank: int  # numbers of the compressed key and value (kv_lora_rank)
    rope_dim: int  # numbers of the shared rotary key (qk_rope_head_dim)
    index_bytes: int = 0  # bytes a vector of a sparse-attention indexer's own cache, whatever the cache's element size
    plain: Attention | None = None  # the same attention kept as plain heads, as an engine without MLA would
    eight_bit_bytes: int | None = None  # of a vector in an 8-bit cache, where its layout keeps parts wider, and scales
    window: int | None = None  # tokens that are still attended to, the newest included
    stride: int = 1
    chosen: int | None = None  # vectors that a token attends to at most: those that the indexer ranks highest
    index_numbers: int = 0  # that the indexer multiplies for each vector: heads x numbers of one

    @property
    def is_bounded(self) -> bool:
        """Whether a long conversation stops growing here."""
        return self.window is not None

    def bytes_per_token(self, element_bytes: int, tp: int = 1) -> int:
        """Bytes of one vector on each GPU, of the indexer's key too."""
        return self.vector_bytes(element_bytes) + self.index_bytes

    def vector_bytes(self, element_bytes: int) -> int:
        """Bytes of one vector alone."""
        if element_bytes == 1 and self.eight_bit_bytes is not None:
            return self.eight_bit_bytes
        return (self.rank + self.rope_dim) * element_bytes

    def tokens_kept(self, tokens: int) -> int:
        """Vectors kept of a conversation of `tokens`."""
        return -(-min(tokens, self.window or tokens) // self.stride)

    def fixed_bytes(self, tp: int = 1) -> int:
        """Bytes that do not depend on length: none."""
        return 0


class State(Struct, frozen=True, tag=True):
    """A recurrent state: the last inputs of a short convolution, and a matrix for each head."""

    conv_channels: int = 0  # channels of the convolution that are split over GPUs
    conv_group_channels: int = (
        0  # channels of one group beside them (Mamba 2's B and C); groups are repeated, not split
    )
    conv_groups: int = 0
    conv_steps: int = 0  # inputs kept for each channel: kernel - 1
    heads: int = 0
    head_numbers: int = 0  # numbers of one head's state
    out_channels: int = 0  # channels that leave the layer; no cache, but its projections are as wide
    conv_element_bytes: int = 2
    state_element_bytes: int = 2
    repeated: bool = False  # on every GPU instead of split

    is_bounded = True
    stride = 1

    def bytes_per_token(self, element_bytes: int, tp: int = 1) -> int:
        """Bytes that a further token adds: none."""
        return 0

    def tokens_kept(self, tokens: int) -> int:
        """No token is kept as such."""
        return 0

    def fixed_bytes(self, tp: int = 1) -> int:
        """Bytes of one sequence's state on one of `tp` GPUs. Groups are filled up to a multiple of tp, as vLLM does."""
        tp = 1 if self.repeated else tp
        conv = self.channels(tp) // tp * self.conv_steps * self.conv_element_bytes
        return conv + self.heads // tp * self.head_numbers * self.state_element_bytes

    def channels(self, tp: int = 1) -> int:
        """Channels of the convolution over all `tp` GPUs."""
        groups = self.conv_groups if self.conv_groups % tp == 0 else max(tp, self.conv_groups)
        return self.conv_channels + groups * self.conv_group_channels


Cache = Attention | Latent | State
Layer = tuple[Cache, ...]
