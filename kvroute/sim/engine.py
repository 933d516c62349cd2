"""How long one step of an engine takes.

A step computes prompt tokens (bound by arithmetic) and one token for each decoding sequence (bound by reading weights
and KV cache), so its time is a sum of five terms. The defaults describe an 8B-class model in 16 bits on one 80 GB
accelerator with 3.3 TB/s and about 400 TFLOP/s of useful arithmetic:

  weights   16 GB / 3.3 TB/s                                     about 5 ms a step
  prefill   2 x 8e9 FLOP a token / 400e12                        40 us a token
  attention 4 x 32 layers x 4096 wide FLOP a pair / 400e12       1.3 ns a (token, earlier token) pair
  sequence  sampling, bookkeeping, launch                        20 us a decoding sequence
  KV read   131,072 B a token / 3.3 TB/s                         40 ns a token in the cache of a decoding sequence

The figures are orders of magnitude, not a measurement of any product.
"""

from __future__ import annotations

from msgspec import Struct


class StepWork(Struct, frozen=True, kw_only=True):
    """What one step computes."""

    prefill_tokens: int = 0
    prefill_pairs: int = 0  # sum over prompt tokens of the tokens before them: the quadratic part of attention
    decodes: int = 0  # sequences that get their next token
    kv_tokens: int = 0  # tokens in the cache of those sequences, all of which are read


class StepTime(Struct, frozen=True, kw_only=True):
    """The rates of an engine. `speed` divides the whole: 10 is an engine ten times as fast."""

    base_s: float = 0.005
    prefill_token_s: float = 40e-6
    prefill_pair_s: float = 1.3e-9
    decode_s: float = 20e-6
    kv_token_s: float = 40e-9
    speed: float = 1.0

    def __post_init__(self) -> None:
        if not self.speed > 0:
            raise ValueError(f"speed must be greater than 0, got {self.speed}")

    def seconds(self, work: StepWork) -> float:
        """Return the duration of a step that computes `work`."""
        total = (
            self.base_s
            + work.prefill_tokens * self.prefill_token_s
            + work.prefill_pairs * self.prefill_pair_s
            + work.decodes * self.decode_s
            + work.kv_tokens * self.kv_token_s
        )
        return total / self.speed
