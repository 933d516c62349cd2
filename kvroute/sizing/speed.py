"""How fast it can be: floors that follow from bytes over bandwidth and operations over compute.

    decode    every step reads the weights once and the cache of every running conversation: time >= bytes / bandwidth
    prefill   2 operations a parameter and token, and a quadratic term for attention: time >= operations / FLOP/s
    copy      a cached prefix back from a lower tier: latency + bytes / bandwidth of the tier

Real engines are slower than these floors: kernels reach 60 to 80 % of bandwidth, prefill 40 to 60 % of peak compute;
launches and communication between GPUs are not counted. `efficiency` scales a floor to what was measured. Times are in
seconds.
"""

from __future__ import annotations

from collections import Counter

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import ONE_GPU, Parallel, kv_bytes, kv_bytes_per_gpu
from kvroute.sizing.hardware import GB, Hardware
from kvroute.sizing.layers import Attention, Latent, State
from kvroute.sizing.model import Model
from kvroute.sizing.weights import Weights

PREFILL_EFFICIENCY = 0.5  # of peak compute: what to expect before anything was measured
DECODE_EFFICIENCY = 0.7  # of memory bandwidth
TYPICAL_BATCH = 64  # sequences, over which the cost of a further one is averaged
UNBOUNDED = 1 << 40  # tokens: longer than any context, so that a bounded layer shows its bound


class Tier(Struct, frozen=True):
    """A place where cached blocks can wait."""

    name: str
    bytes_s: int
    latency_s: float = 0.0
    per_gpu: bool = False  # every GPU has a link of its own, over which it brings its part of the cache


def tiers(hardware: Hardware) -> tuple[Tier, ...]:
    """Typical lower tiers: CPU memory over this GPU's PCIe, a PCIe 4 NVMe disk, a 100 Gbit/s network."""
    return (
        Tier("cpu", hardware.host_bytes_s, per_gpu=True),
        Tier("disk", 7 * GB, 0.0002),
        Tier("network", 12_500_000_000, 0.0005),
    )


class Seeds(Struct, frozen=True):
    """Rates to start from before any were learnt: what a router or a simulator needs of a replica.

    A decode step of a batch takes `step_s` plus `step_s_per_token` for each token of history that the batch holds, and
    `step_s_per_sequence` for each further sequence.
    """

    prefill_tokens_s: float
    step_s: float
    step_s_per_token: float
    step_s_per_sequence: float


def _known(model: Model) -> Weights:
    if model.weights is None:
        raise ConfigError("the weights' size is not known: give it with --weights")
    return model.weights


def _positive(value: float, what: str, flag: str) -> float:
    if value <= 0:
        raise ConfigError(f"the hardware's {what} is not stated: give {flag}")
    return value


def decode_step_s(
    model: Model,
    hardware: Hardware,
    *,
    batch: int,
    tokens: int,
    parallel: Parallel = ONE_GPU,
    element_bytes: int | None = None,
    efficiency: float = 1.0,
) -> float:
    """Least time of one decode step of `batch` conversations with `tokens` of history each.

    Raises:
        ConfigError: the size of the weights or the bandwidth is not known.
    """
    one_engine = Parallel(tp=parallel.tp, dcp=parallel.dcp)  # pipeline stages follow each other within a step
    read = kv_bytes_per_gpu(model, 0, one_engine, element_bytes) + sum(
        min(tokens, tokens if reach.limit_tokens is None else reach.limit_tokens) * reach.token_bytes
        for reach in reaches(model, one_engine, element_bytes)
    )
    bandwidth = _positive(hardware.bandwidth_bytes_s, "bandwidth", "--gpu-bandwidth") * efficiency
    return weights_s(model, hardware, batch, parallel=parallel, efficiency=efficiency) + batch * read / bandwidth


def weights_s(
    model: Model, hardware: Hardware, tokens: int, *, parallel: Parallel = ONE_GPU, efficiency: float = 1.0
) -> float:
    """Least time to read the weights once, as a step that computes `tokens` must: of experts, those that it touches.

    Raises:
        ConfigError: the size of the weights or the bandwidth is not known.
    """
    bandwidth = _positive(hardware.bandwidth_bytes_s, "bandwidth", "--gpu-bandwidth") * efficiency
    return _known(model).read_bytes(tokens) / parallel.tp / bandwidth


class Reach(Struct, frozen=True):
    """The layers of a model that attend equally far back, taken together."""

    limit_tokens: int | None  # that a token attends to at most, itself included; None = all
    pair_operations: float  # for each token and token that it attends to
    token_bytes: float  # that one token keeps, on each GPU


def reaches(model: Model, parallel: Parallel = ONE_GPU, element_bytes: int | None = None) -> tuple[Reach, ...]:
    """Sum up a model's attention by how far it reaches. Layers that keep a fixed state are not in it.

    Sparse attention counts twice: its indexer looks at every token, its heads at as many as the indexer chooses.
    """
    size = model.element_bytes if element_bytes is None else element_bytes
    found: dict[int | None, Reach] = {}
    for cache, count in Counter(cache for cache in model.caches if not isinstance(cache, State)).items():
        for limit, operations, read in _reaches_of(cache, model.query_heads, size, parallel.tp):
            before = found.get(limit, Reach(limit, 0.0, 0.0))
            found[limit] = Reach(
                limit,
                before.pair_operations + count * operations / cache.stride,
                before.token_bytes + count * read / cache.stride / parallel.dcp,
            )
    return tuple(found.values())


def _reaches_of(cache: Attention | Latent, query_heads: int, size: int, tp: int) -> list[tuple[int | None, float, int]]:
    """Tokens that one cache's layer attends to at most; operations and bytes read for each entry of them."""
    limit = cache.tokens_kept(UNBOUNDED) * cache.stride if cache.is_bounded else None
    operations = 2.0 * query_heads * _numbers(cache)
    if not isinstance(cache, Latent) or cache.chosen is None:
        return [(limit, operations, cache.bytes_per_token(size, tp))]
    return [
        (cache.chosen * cache.stride, operations, cache.vector_bytes(size)),
        (limit, 2.0 * cache.index_numbers, cache.index_bytes),
    ]


def attended(limit_tokens: int | None, tokens: int) -> int:
    """Sum over the first `tokens` positions of how many tokens each attends to, where it reaches `limit_tokens`."""
    kept = tokens if limit_tokens is None else min(tokens, limit_tokens)
    return kept * (kept + 1) // 2 + (tokens - kept) * kept


def prefill_operations(model: Model, tokens: int, cached_tokens: int = 0) -> tuple[float, float]:
    """Operations to prefill `tokens` after `cached_tokens`: those of the weights, and those of attention.

    Attention of a token at position p costs 2 x query heads x (key + value numbers) x p; a window bounds p.
    """
    linear = 2.0 * _known(model).active_parameters * tokens
    return linear, sum(
        reach.pair_operations
        * (attended(reach.limit_tokens, cached_tokens + tokens) - attended(reach.limit_tokens, cached_tokens))
        for reach in reaches(model)
    )


def _numbers(cache: Attention | Latent) -> int:
    """Numbers of a key and a value as attention multiplies them. A recurrence's operations are the weights' own."""
    if isinstance(cache, Attention):
        return cache.key_dim + cache.value_dim
    return cache.plain.key_dim + cache.plain.value_dim if cache.plain else 2 * cache.rank + cache.rope_dim


def prefill_s(
    model: Model,
    hardware: Hardware,
    tokens: int,
    *,
    cached_tokens: int = 0,
    parallel: Parallel = ONE_GPU,
    eight_bit: bool = False,
    quadratic: bool = True,
    efficiency: float = 1.0,
) -> float:
    """Least time to prefill `tokens` after `cached_tokens`. `quadratic=False` leaves attention's own term out.

    Raises:
        ConfigError: the size of the weights or the compute is not known.
    """
    linear, attention = prefill_operations(model, tokens, cached_tokens)
    peak = flops_of(hardware, eight_bit=eight_bit) * parallel.tp * parallel.pp * efficiency
    return (linear + (attention if quadratic else 0.0)) / peak


def flops_of(hardware: Hardware, *, eight_bit: bool = False) -> int:
    """Dense operations a second of one GPU, in 8-bit numbers where it has them and the weights are such.

    Raises:
        ConfigError: the compute is not known.
    """
    flops = (hardware.flops_8bit if eight_bit else None) or hardware.flops
    _positive(flops, "compute", "--gpu-tflops")
    return flops


def computes_in_8_bits(model: Model) -> bool:
    """Whether the weights are 8-bit numbers, as those of FP8 checkpoints; 4-bit ones are computed in 16 bits."""
    weights = model.weights
    return weights is not None and 0.9 < weights.total_bytes / weights.parameters < 1.2


def copy_s(
    model: Model, tokens: int, tier: Tier, element_bytes: int | None = None, *, parallel: Parallel = ONE_GPU
) -> float:
    """Least time to bring the cache of `tokens` back from a lower tier, one copy of it or each GPU's part at once."""
    if tier.per_gpu:
        return tier.latency_s + kv_bytes_per_gpu(model, tokens, parallel, element_bytes) / tier.bytes_s
    return tier.latency_s + kv_bytes(model, tokens, element_bytes) / tier.bytes_s


def copy_pays_from_tokens(
    model: Model,
    hardware: Hardware,
    tier: Tier,
    element_bytes: int | None = None,
    *,
    parallel: Parallel = ONE_GPU,
    efficiency: float = 1.0,
) -> int | None:
    """Length from which a copy beats computing the prefix again; None where computing stays faster up to 10 M tokens.

    Found by bisection between floors. It assumes that the advantage of copying grows with length, as it does: computing
    has a quadratic term, copying is at most linear.
    """

    def pays(tokens: int) -> bool:
        eight_bit = computes_in_8_bits(model)
        again = prefill_s(model, hardware, tokens, parallel=parallel, eight_bit=eight_bit, efficiency=efficiency)
        return copy_s(model, tokens, tier, element_bytes, parallel=parallel) < again

    low, high = 0, 10_000_000
    if not pays(high):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if pays(middle) else (middle, high)
    return high


def seeds(
    model: Model,
    hardware: Hardware,
    *,
    parallel: Parallel = ONE_GPU,
    element_bytes: int | None = None,
    typical_tokens: int = 8_000,
) -> Seeds:
    """Rates to start from, at the usual share of the floors."""

    eight_bit = computes_in_8_bits(model)

    def step(tokens: int, batch: int = 1) -> float:
        return (
            decode_step_s(model, hardware, batch=batch, tokens=tokens, parallel=parallel, element_bytes=element_bytes)
            / DECODE_EFFICIENCY
        )

    empty = step(0)
    computed = prefill_s(
        model, hardware, typical_tokens, parallel=parallel, eight_bit=eight_bit, efficiency=PREFILL_EFFICIENCY
    )
    # A further sequence reads its state and the experts that no other needs, and is computed as a token of prefill is.
    more = (step(0, TYPICAL_BATCH) - empty) / (TYPICAL_BATCH - 1)
    token = prefill_s(model, hardware, 1, parallel=parallel, eight_bit=eight_bit, efficiency=PREFILL_EFFICIENCY)
    return Seeds(typical_tokens / computed, empty, (step(typical_tokens) - empty) / typical_tokens, more + token)
