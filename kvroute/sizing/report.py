"""The values of a sizing report: what was asked for, and the whole answer to "what fits".

Tables, JSON and pages are made from `Report` alone, so nothing is computed twice. `assemble` fills it in.
"""

from __future__ import annotations

from msgspec import Struct

from kvroute.sizing.capacity import ONE_GPU, Parallel, Share

LENGTHS = (8_000, 32_000, 128_000)  # tokens, cut to the model's context
BATCHES = (1, 8, 32)


class Wishes(Struct, frozen=True, kw_only=True):
    """What the user asked for."""

    lengths: tuple[int, ...] = LENGTHS
    batches: tuple[int, ...] = BATCHES
    cache_dtype: str = "auto"
    parallel: Parallel = ONE_GPU
    utilisation: float = 0.92
    weights_bytes: int | None = None  # stated; else counted from the shape
    working_bytes: int = 0  # on each GPU
    max_model_len: int | None = None
    block_size: int = 16
    batched_tokens: int = 8_192
    hybrid: bool = True
    users: int = 0  # of a common prefix
    prefix_tokens: int = 0
    mix: tuple[Share, ...] = ()


class Length(Struct, frozen=True):
    """One conversation of this length."""

    tokens: int
    kv_bytes: int
    kv_bytes_all_layers: int  # where the engine keeps window layers whole


class Fit(Struct, frozen=True):
    """How many conversations of a length fit on a machine."""

    tokens: int
    conversations: int
    conversations_fp8: int  # with an 8-bit cache
    conversations_all_layers: int  # where the engine keeps window layers whole


class Decode(Struct, frozen=True):
    """The floor of a decode step."""

    batch: int
    tokens: int
    step_s: float
    tokens_per_s_per_user: float
    fits: bool


class Prefill(Struct, frozen=True):
    """Floors of computing a prefix, and of copying it back from each tier."""

    tokens: int
    weights_s: float  # 2 operations a parameter and token
    total_s: float  # with attention's own
    copy_s: dict[str, float]


class Planned(Struct, frozen=True, kw_only=True):
    """The cache of one engine as vLLM would lay it out."""

    max_model_len: int
    starts: bool  # whether one conversation of max_model_len fits
    longest_start: int  # largest --max-model-len with which it starts
    tokens: int  # as its log and metrics report
    max_concurrency: float
    blocks: int
    block_size: int
    bytes_per_block: int
    groups: int
    differs: tuple[str, ...]  # why this is not the ideal figure


class Machine(Struct, frozen=True, kw_only=True):
    """One kind of GPU, as many as the parallelism takes."""

    gpu: str
    gpus: int
    parallel: Parallel
    source: str
    per_gpu_bytes: int  # left for the cache on each GPU; negative: the model does not load
    usable_bytes: int  # left for the cache over all GPUs, copies that tensor parallelism makes included
    capacity_tokens: int  # over all GPUs, in one long conversation an engine
    fits: tuple[Fit, ...]
    mix_conversations: int | None
    vllm: Planned | None  # None where nothing is left for a cache
    decode: tuple[Decode, ...]
    prefill: tuple[Prefill, ...]
    copy_pays_from_tokens: dict[str, int | None]
    warnings: tuple[str, ...]


class Report(Struct, frozen=True, kw_only=True):
    """Everything there is to print. `kv_bytes_per_token` is what a further token of a long conversation takes."""

    model: str
    family: str
    kv_bytes_per_token: int
    kv_bytes_per_token_all_layers: int
    state_bytes_per_sequence: int
    cache_dtype: str
    layers: int
    full_layers: int  # that keep every token
    window_layers: int
    state_layers: int
    context_tokens: int | None
    parameters: int | None
    active_parameters: int | None
    weights_bytes: int | None
    lengths: tuple[Length, ...]
    mix_bytes: int | None
    shared_prefix_bytes: tuple[int, int] | None  # unshared, shared
    machines: tuple[Machine, ...]
    notes: tuple[str, ...]
