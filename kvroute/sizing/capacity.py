"""What fits: bytes of a token, of a conversation and of a pool, as plain arithmetic over a model's shape.

This is the ideal: no blocks, no groups, no padding. What one engine makes of the same memory is in `planner`. Bytes are
decimal counts (GB = 10^9 where a figure is printed). Formulas: keys and values of every layer for every token that the
layer keeps, `layers x KV heads x (key + value numbers) x bytes of a number`; a fixed state where a layer is recurrent.

What it does not know: memory for activations, CUDA graphs and fragmentation (give them as `working_bytes`), and how
long conversations really are (give a mix).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from math import ceil, floor, fsum

from msgspec import Struct, structs

from kvroute.errors import ConfigError
from kvroute.sizing.fields import shown
from kvroute.sizing.layers import Attention, Cache, Latent
from kvroute.sizing.model import Model

CACHE_DTYPE_BYTES = {
    "bfloat16": 2,
    "float16": 2,
    "fp16": 2,
    "bf16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "fp8_ds_mla": 1,  # packed: see Latent.eight_bit_bytes
    "int8": 1,
    "float32": 4,
}


class Parallel(Struct, frozen=True):
    """How an engine is spread over GPUs."""

    tp: int = 1  # tensor parallel: KV heads are split, and repeated past their number
    pp: int = 1  # pipeline parallel: layers are split
    dp: int = 1  # data parallel: whole engines side by side
    dcp: int = 1  # decode context parallel: tokens are split, over the GPUs of tensor parallelism

    @property
    def gpus(self) -> int:
        """GPUs that all of it takes. Context parallelism reuses those of tensor parallelism."""
        return self.tp * self.pp * self.dp


ONE_GPU = Parallel()
TOKENS_LIMIT = 1 << 40  # more than any cache holds


class Budget(Struct, frozen=True, kw_only=True):
    """The memory of the GPUs and what is taken before the cache gets any."""

    gpu_bytes: int  # of one GPU
    weights_bytes: int  # of one whole copy, spread over tp x pp GPUs
    parallel: Parallel = ONE_GPU
    utilisation: float = 0.9  # share of the GPU that the engine may take (vLLM: --gpu-memory-utilization)
    working_bytes: int = 0  # activations, CUDA graphs and the like, on each GPU

    @property
    def per_gpu_bytes(self) -> int:
        """Bytes left for the cache on each GPU; negative where the model does not even load."""
        share = ceil(self.weights_bytes / (self.parallel.tp * self.parallel.pp))
        return floor(self.gpu_bytes * self.utilisation) - share - self.working_bytes

    @property
    def usable_bytes(self) -> int:
        """Bytes left for the cache over the GPUs of one engine."""
        return self.per_gpu_bytes * self.parallel.tp * self.parallel.pp


def cache_bytes(dtype: str, model: Model) -> int:
    """Bytes of one number in a cache of this dtype; "auto" is the model's own.

    Raises:
        ConfigError: the dtype is not known.
    """
    if dtype == "auto":
        return model.element_bytes
    if dtype not in CACHE_DTYPE_BYTES:
        raise ConfigError(f"cache dtype {shown(dtype)} is not known; choose auto, {', '.join(CACHE_DTYPE_BYTES)}")
    return CACHE_DTYPE_BYTES[dtype]


def kv_bytes_per_token(model: Model, element_bytes: int | None = None) -> int:
    """Bytes that one more token adds to a long conversation: the layers that keep everything.

    Window layers and recurrent layers have stopped growing by then; `kv_bytes_per_token_unbounded` counts the windows.
    """
    size = model.element_bytes if element_bytes is None else element_bytes
    return _rounded(cache.bytes_per_token(size) / cache.stride for cache in model.caches if not cache.is_bounded)


def kv_bytes_per_token_unbounded(model: Model, element_bytes: int | None = None) -> int:
    """Bytes of one token where every attention layer keeps it: short conversations, or no window support."""
    size = model.element_bytes if element_bytes is None else element_bytes
    return _rounded(cache.bytes_per_token(size) / cache.stride for cache in model.caches)


def _rounded(parts: Iterable[float]) -> int:
    """Whole bytes of a sum; a compressed layer adds less than a vector for each token."""
    return ceil(fsum(parts))


def state_bytes(model: Model) -> int:
    """Bytes that a sequence takes whatever its length (Mamba, linear attention)."""
    return sum(cache.fixed_bytes() for cache in model.caches)


def kv_bytes(model: Model, tokens: int, element_bytes: int | None = None, *, windows: bool = True) -> int:
    """Bytes that a conversation of `tokens` takes. `windows=False`: an engine that keeps window layers whole."""
    size = model.element_bytes if element_bytes is None else element_bytes
    return sum(
        _kept(cache, tokens, windows) * cache.bytes_per_token(size) + cache.fixed_bytes() for cache in model.caches
    )


def kv_bytes_per_gpu(
    model: Model, tokens: int, parallel: Parallel, element_bytes: int | None = None, *, windows: bool = True
) -> int:
    """Bytes of a conversation on the GPU that holds most of it: heads split by TP, layers by PP, tokens by DCP."""
    size = model.element_bytes if element_bytes is None else element_bytes
    return max(
        sum(
            ceil(_kept(cache, tokens, windows) / parallel.dcp) * cache.bytes_per_token(size, parallel.tp)
            + cache.fixed_bytes(parallel.tp)
            for layer in model.layers[start:end]
            for cache in layer
        )
        for start, end in stages(len(model.layers), parallel.pp)
    )


def _kept(cache: Cache, tokens: int, windows: bool) -> int:
    return cache.tokens_kept(tokens) if windows else ceil(tokens / cache.stride)


def stages(layers: int, pp: int) -> list[tuple[int, int]]:
    """Return the first and the one-past-last layer of each pipeline stage.

    As vLLM splits: evenly, the rest to the stages before the last, which also carries the output head.
    """
    sizes = [layers // pp] * pp
    for one in range(2, layers % pp + 2):
        sizes[-one] += 1
    ends = [sum(sizes[: one + 1]) for one in range(pp)]
    return [(end - size, end) for end, size in zip(ends, sizes, strict=True)]


def conversations(
    model: Model, tokens: int, usable_bytes: int, element_bytes: int | None = None, *, windows: bool = True
) -> int:
    """How many conversations of `tokens` each fit into `usable_bytes` (0 where nothing is left for a cache)."""
    return max(0, usable_bytes) // max(1, kv_bytes(model, tokens, element_bytes, windows=windows))


def conversations_on(
    budget: Budget, model: Model, tokens: int, element_bytes: int | None = None, *, windows: bool = True
) -> int:
    """How many conversations of `tokens` fit on the GPUs of a budget, all data-parallel engines together."""
    each = kv_bytes_per_gpu(model, tokens, budget.parallel, element_bytes, windows=windows)
    return budget.parallel.dp * (max(0, budget.per_gpu_bytes) // max(1, each))


def tokens_on(
    budget: Budget, model: Model, element_bytes: int | None = None, *, typical_tokens: int | None = None
) -> int:
    """Tokens that fit on the GPUs of a budget, all data-parallel engines together; 0 where no cache grows.

    Counted on the fullest GPU, so heads and latent vectors that tensor parallelism repeats are paid on every GPU. In
    conversations of `typical_tokens` each; without it, one very long conversation an engine is meant.
    """
    room = max(0, budget.per_gpu_bytes)

    def each(tokens: int) -> int:
        return kv_bytes_per_gpu(model, tokens, budget.parallel, element_bytes)

    if typical_tokens:
        return budget.parallel.dp * (room * typical_tokens // max(1, each(typical_tokens)))
    if each(TOKENS_LIMIT) <= room:
        return 0
    return budget.parallel.dp * max(0, bisect_right(range(TOKENS_LIMIT), room, key=each) - 1)


def capacity_tokens(
    model: Model, usable_bytes: int, element_bytes: int | None = None, *, typical_tokens: int | None = None
) -> int:
    """Tokens that a cache of `usable_bytes` holds.

    With windows or recurrent layers that depends on how long the conversations are: `typical_tokens` each; without it,
    one very long conversation is meant.
    """
    room = max(0, usable_bytes)
    if typical_tokens:
        return room * typical_tokens // max(1, kv_bytes(model, typical_tokens, element_bytes))
    bounded = kv_bytes(model, 0, element_bytes)
    growing = kv_bytes_per_token(model, element_bytes)
    return max(0, room - bounded) // growing if growing else 0


def as_plain_heads(model: Model, *, value_dim: int | None = None) -> Model:
    """The same model with latent attention kept as plain heads, as engines without MLA keep it, for contrast.

    `value_dim` replaces both head sizes, for engines that store keys without their rotary part.
    """
    layers = tuple(tuple(_plain(cache, value_dim) for cache in layer) for layer in model.layers)
    return structs.replace(model, layers=layers)


def _plain(cache: Cache, value_dim: int | None) -> Cache:
    if not isinstance(cache, Latent) or cache.plain is None:
        return cache
    return cache.plain if value_dim is None else Attention(cache.plain.kv_heads, value_dim, value_dim)


class Share(Struct, frozen=True):
    """A part of the traffic: this share of the conversations, this long."""

    share: float
    tokens: int


def mix_bytes(model: Model, mix: Sequence[Share], element_bytes: int | None = None) -> float:
    """Mean bytes of a conversation of a mix of lengths. Longer ones weigh by what they take, not by their number.

    Raises:
        ConfigError: the shares do not add up to 1, or one is negative.
    """
    _check_mix(mix)
    return sum(part.share * kv_bytes(model, part.tokens, element_bytes) for part in mix)


def _check_mix(mix: Sequence[Share]) -> None:
    # Said this way round, a share that is no number is refused as well.
    if not (mix and all(part.share >= 0 for part in mix) and abs(sum(part.share for part in mix) - 1) <= 1e-6):
        raise ConfigError("mix: the shares must be 0 or more and add up to 1, such as 95%:8000,5%:64000")


def conversations_of_mix(
    model: Model, mix: Sequence[Share], usable_bytes: int, element_bytes: int | None = None
) -> int:
    """How many conversations of a mix fit at once, in their shares."""
    return floor(max(0, usable_bytes) / max(1.0, mix_bytes(model, mix, element_bytes)))


def conversations_of_mix_on(
    budget: Budget, model: Model, mix: Sequence[Share], element_bytes: int | None = None
) -> int:
    """How many conversations of a mix fit on the GPUs of a budget, all data-parallel engines together.

    Raises:
        ConfigError: the shares do not add up to 1, or one is negative.
    """
    _check_mix(mix)
    each = sum(part.share * kv_bytes_per_gpu(model, part.tokens, budget.parallel, element_bytes) for part in mix)
    return budget.parallel.dp * floor(max(0, budget.per_gpu_bytes) / max(1.0, each))


def shared_prefix_bytes(
    model: Model, users: int, prefix_tokens: int, element_bytes: int | None = None
) -> tuple[int, int]:
    """Bytes of a common prefix without sharing (a copy for every user) and with it (one copy)."""
    one = kv_bytes(model, prefix_tokens, element_bytes)
    return users * one, one


def reserved_waste(used_tokens: int, reserved_tokens: int) -> float:
    """Share of a whole-context reservation that a conversation of `used_tokens` leaves empty."""
    return 1 - used_tokens / reserved_tokens


def paged_waste(used_tokens: int, block_size: int) -> float:
    """Share of a conversation's blocks that is empty: only in its last block."""
    held = ceil(used_tokens / block_size) * block_size
    return 1 - used_tokens / held if held else 0.0
