"""What vLLM makes of the memory that is left for its cache: pages, groups, blocks, and the tokens that it will report.

    page    one layer's bytes for one block of tokens
    group   layers that share a block table, because they keep the same tokens; all groups have about as many layers
    block   one page of each layer of a group; all groups draw from one pool, so it is as large as the largest group

A conversation takes blocks from every group: all its tokens from full layers, the window and the batches in flight from
window layers, a state or two from recurrent ones. Block 0 is never used. What vLLM logs as tokens is its concurrency at
max_model_len times max_model_len, so a model with windows reports more the longer that is.

Follows `v1/core/kv_cache_utils.py` and `v1/kv_cache_interface.py` of vLLM 0.32, for layer-outermost cache layouts.
Not modelled: draft models, packed layouts of mixed page sizes, host-resident groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import Literal

from msgspec import Struct, structs

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import ONE_GPU, Parallel, stages
from kvroute.sizing.layers import Attention, Cache, Latent, State
from kvroute.sizing.model import Model

GPUS_LIMIT = 1_024  # in each direction of parallelism
LATENT_BLOCK_TOKENS = 128  # hybrid models with latent attention use block sizes that are multiples of this
EVEN_OUT_BELOW = 1.5  # group sizes that differ by less are filled up to the larger instead of split to the smaller


class NoPlanError(ConfigError):
    """The model's design is one that this planner, or vLLM itself, does not lay out; the ideal figures still hold."""


class Settings(Struct, frozen=True, kw_only=True):
    """The engine's settings that its plan depends on, with vLLM's flag names where they differ."""

    max_model_len: int
    block_size: int = 16
    element_bytes: int = 2  # --kv-cache-dtype
    parallel: Parallel = ONE_GPU
    batched_tokens: int = 8_192  # --max-num-batched-tokens
    batches_in_flight: int = 2  # 2 with asynchronous scheduling, else the pipeline stages
    hybrid: bool = True  # False: --disable-hybrid-kv-cache-manager
    prefix_caching: bool = True  # recurrent layers keep two states with it, one without
    blocks_override: int | None = None  # --num-gpu-blocks-override


class Spec(Struct, frozen=True):
    """What one layer keeps in a block."""

    kind: Literal["full", "latent", "window", "chunk", "state"]
    token_bytes: int  # of a token in this layer; 0 for a state
    block_size: int
    page_bytes: int
    span: int = 0  # tokens of the window or the chunk


class Group(Struct, frozen=True):
    """Layers that share a block table."""

    specs: tuple[Spec, ...]  # one a layer, in order
    layers: tuple[int, ...]  # which layers of the model these are
    blocks_per_request: int  # at max_model_len


class Plan(Struct, frozen=True, kw_only=True):
    """An engine's cache as planned, on each GPU of its smallest pipeline stage."""

    groups: tuple[Group, ...]
    bytes_per_block: int
    blocks: int  # block 0, which is never used, included
    blocks_per_request: int  # of one conversation of max_model_len, all groups
    block_size: int  # tokens of a block of the attention layers
    max_model_len: int
    dcp: int = 1

    @property
    def max_concurrency(self) -> float:
        """How many conversations of max_model_len the pool is worth; under 1 vLLM refuses to start."""
        return self.blocks / self.blocks_per_request

    @property
    def tokens(self) -> int:
        """Tokens as vLLM reports them since 0.22."""
        return int(self.max_concurrency * self.max_model_len)

    @property
    def tokens_before_0_22(self) -> int:
        """Tokens as older releases reported them: blocks shared evenly among groups, whatever those need."""
        return self.blocks // len(self.groups) * min(group.specs[0].block_size for group in self.groups) * self.dcp

    @property
    def starts(self) -> bool:
        """Whether one conversation of max_model_len fits beside the block that is never used, as vLLM demands."""
        return self.blocks_per_request <= self.blocks - 1


def plan(model: Model, available_bytes: int | Sequence[int], settings: Settings) -> Plan:
    """Plan the cache of one engine from the bytes available on each GPU (one figure, or one for each pipeline stage).

    Raises:
        ConfigError: a setting is out of range, or vLLM itself could not plan this combination.
    """
    check(settings)
    if settings.parallel.pp > len(model.layers):
        raise ConfigError(f"pp {settings.parallel.pp} stages are more than the model's {len(model.layers)} layers")
    specs = _specs(model, settings)
    groups = _groups(specs, settings)
    parts = stages(len(model.layers), settings.parallel.pp)
    memory = [available_bytes] * len(parts) if isinstance(available_bytes, int) else list(available_bytes)
    if len(memory) != len(parts):
        raise ConfigError(f"available memory is given for {len(memory)} pipeline stages, but there are {len(parts)}")
    sizes = [_bytes_per_block(groups, start, end) for start, end in parts]
    blocks = min(max(0, left) // size for left, size in zip(memory, sizes, strict=True) if size)
    return Plan(
        groups=tuple(groups),
        bytes_per_block=max(sizes),
        blocks=blocks if settings.blocks_override is None else settings.blocks_override,
        blocks_per_request=sum(group.blocks_per_request for group in groups),
        block_size=next((spec.block_size for _, spec in specs if spec.kind != "state"), settings.block_size),
        max_model_len=settings.max_model_len,
        dcp=settings.parallel.dcp,
    )


def longest_start(model: Model, available_bytes: int, settings: Settings) -> int:
    """The largest max_model_len, up to the one in the settings, with which the engine would start; 0 where none is."""
    low, high = 0, settings.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        fits = plan(model, available_bytes, structs.replace(settings, max_model_len=middle)).starts
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


def check(settings: Settings) -> None:
    """Refuse settings that no engine could have.

    Raises:
        ConfigError: a setting is out of range; the message names it.
    """
    parallel = settings.parallel
    for name, value in (
        ("max_model_len", settings.max_model_len),
        ("block_size", settings.block_size),
        ("batched_tokens", settings.batched_tokens),
        ("batches_in_flight", settings.batches_in_flight),
        ("tp", parallel.tp),
        ("pp", parallel.pp),
        ("dp", parallel.dp),
        ("dcp", parallel.dcp),
    ):
        if value < 1:
            raise ConfigError(f"{name} must be 1 or more, not {value}")
    if max(parallel.tp, parallel.pp, parallel.dp, parallel.dcp) > GPUS_LIMIT:
        raise ConfigError(f"tp, pp, dp and dcp must each be at most {GPUS_LIMIT:,}")
    if parallel.tp % parallel.dcp:
        raise ConfigError(f"dcp {parallel.dcp} must divide tp {parallel.tp}: it uses the same GPUs")


def _specs(model: Model, settings: Settings) -> list[tuple[int, Spec]]:
    """One spec for each cache, with the number of its layer; block sizes settled as vLLM's platform does first."""
    if any(isinstance(cache, Latent) and (cache.stride > 1 or cache.is_bounded) for cache in model.caches):
        raise NoPlanError(
            "vLLM packs compressed latent attention into pages of mixed sizes, which are not planned here"
        )
    tp = settings.parallel.tp
    block = _hybrid_block_size(model, settings)
    specs = []
    for index, layer in enumerate(model.layers):
        for cache in layer:
            specs.append((index, _spec(cache, block, settings.element_bytes, tp)))
    attention = [spec.page_bytes for _, spec in specs if spec.kind != "state"]
    if attention and len(attention) < len(specs):  # states are padded to the attention layers' page
        page = min(attention)
        specs = [
            (index, structs.replace(spec, page_bytes=max(page, spec.page_bytes)) if spec.kind == "state" else spec)
            for index, spec in specs
        ]
    if not settings.hybrid and len({spec.kind for _, spec in specs} - {"state"}) > 1:
        specs = [(index, _promoted(spec)) for index, spec in specs]
    if settings.parallel.dcp > 1 and any(spec.kind == "window" for _, spec in specs):
        raise ConfigError("vLLM does not combine decode context parallelism with sliding windows: use dcp 1")
    return specs


def _spec(cache: Cache, block: int, element_bytes: int, tp: int) -> Spec:
    if isinstance(cache, State):
        return Spec("state", 0, block, cache.fixed_bytes(tp))
    token = cache.bytes_per_token(element_bytes, tp)
    if isinstance(cache, Latent):
        return Spec("latent", token, block, token * block)
    if cache.window is not None:
        return Spec("window", token, block, token * block, cache.window)
    if cache.chunk is not None:
        return Spec("chunk", token, block, token * block, cache.chunk)
    return Spec("full", token, block, token * block)


def _promoted(spec: Spec) -> Spec:
    """Without the hybrid manager, layers with a window keep everything."""
    return structs.replace(spec, kind="full", span=0) if spec.kind in ("window", "chunk") else spec


def _hybrid_block_size(model: Model, settings: Settings) -> int:
    """In hybrid models the attention block grows until its page holds a state."""
    states = [cache.fixed_bytes(settings.parallel.tp) for cache in model.caches if isinstance(cache, State)]
    attention = [cache for cache in model.caches if isinstance(cache, Attention | Latent)]
    if not states or not attention:
        return settings.block_size
    latent = isinstance(attention[0], Latent)
    step = max(settings.block_size, LATENT_BLOCK_TOKENS) if latent else settings.block_size
    token = attention[0].bytes_per_token(settings.element_bytes, settings.parallel.tp)
    return max(settings.block_size, step * ceil(max(states) / (step * token)))


def _groups(specs: list[tuple[int, Spec]], settings: Settings) -> list[Group]:
    kinds = {(spec.kind, spec.span, spec.block_size) for _, spec in specs}
    if len(kinds) == 1 and (specs[0][1].kind != "state" or len({spec for _, spec in specs}) == 1):
        return [_group(specs, settings)]  # one block table serves them all, whatever their page sizes
    buckets: dict[Spec, list[tuple[int, Spec]]] = {}
    for index, spec in _one_page_size(specs):
        buckets.setdefault(spec, []).append((index, spec))
    counts = [len(bucket) for bucket in buckets.values()]
    size = max(counts) if max(counts) < min(counts) * EVEN_OUT_BELOW else min(counts)
    groups = []
    for bucket in buckets.values():
        parts = ceil(len(bucket) / size)
        groups += [_group(bucket[part::parts], settings) for part in range(parts)]
    return groups


def _one_page_size(specs: list[tuple[int, Spec]]) -> list[tuple[int, Spec]]:
    """Make all pages as large as the largest: by more tokens a block where that divides, else by padding."""
    largest = max(spec.page_bytes for _, spec in specs)
    return [(index, _paged(spec, largest)) for index, spec in specs]


def _paged(spec: Spec, page: int) -> Spec:
    if spec.page_bytes == page:
        return spec
    if spec.kind != "state" and page % spec.page_bytes == 0:
        return structs.replace(spec, page_bytes=page, block_size=spec.block_size * (page // spec.page_bytes))
    if spec.kind == "latent":
        raise NoPlanError("vLLM cannot give latent attention and the other layers one page size: no plan")
    return structs.replace(spec, page_bytes=page)


def _group(members: list[tuple[int, Spec]], settings: Settings) -> Group:
    specs = tuple(spec for _, spec in members)
    blocks = max(_blocks(spec, settings) for spec in dict.fromkeys(specs))
    return Group(specs, tuple(index for index, _ in members), blocks)


def _blocks(spec: Spec, settings: Settings) -> int:
    """Blocks that one conversation of max_model_len takes of a layer."""
    length = settings.max_model_len
    in_flight = settings.batches_in_flight * settings.batched_tokens
    if spec.kind == "state":
        return 2 if settings.prefix_caching else 1
    if spec.kind == "window":  # one more: the window rarely begins at a block's start
        return ceil(min(spec.span - 1 + in_flight, length) / spec.block_size) + 1
    if spec.kind == "chunk":
        return ceil(min(spec.span + in_flight, length) / spec.block_size)
    return ceil(ceil(length / settings.parallel.dcp) / spec.block_size)


def _bytes_per_block(groups: list[Group], start: int, end: int) -> int:
    """Bytes of a block on the GPUs of the stage with layers `start` to `end`."""
    return max(
        sum(spec.page_bytes for spec, layer in zip(group.specs, group.layers, strict=True) if start <= layer < end)
        for group in groups
    )
