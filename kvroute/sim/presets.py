"""Engines by name: a model on some GPUs, as `MODEL@GPU` or `MODEL@NxGPU` for N GPUs in tensor parallel.

From the name follow step times (`engine`), blocks (`kvroute.sizing.planner`) and the scheduler's limits: those that
vLLM 0.33 takes for its server by the GPU's memory (`EngineArgs.get_batch_defaults`), with asynchronous scheduling, that
it uses where it can. Any model and GPU that sizing knows may be combined; PRESETS are the usual pairs. Each says what
its figures rest on.
"""

from __future__ import annotations

from msgspec import Struct

from kvroute.errors import ConfigError
from kvroute.sim.engine import FS, RooflineTime
from kvroute.sim.values import Limits, Offload
from kvroute.sizing.capacity import Budget, Parallel, kv_bytes
from kvroute.sizing.hardware import Hardware, gpu
from kvroute.sizing.model import Model
from kvroute.sizing.planner import Settings, plan
from kvroute.sizing.presets import PRESETS as MODELS
from kvroute.sizing.presets import preset
from kvroute.sizing.speed import DECODE_EFFICIENCY, PREFILL_EFFICIENCY, computes_in_8_bits, copy_s, tiers

GIB = 1 << 30
UTILISATION = 0.92  # vLLM's --gpu-memory-utilization
WORKING_BYTES = 4 << 30  # activations and CUDA graphs of each GPU: an assumption, vLLM measures it at its start
GPUS_LIMIT = 64
CONTEXT_TOKENS = 32_768  # max_model_len, where the model allows as much
SOURCES = {
    "efficiency": f"assumed: {PREFILL_EFFICIENCY:.0%} of peak compute, {DECODE_EFFICIENCY:.0%} of memory bandwidth",
    "limits": "vLLM 0.33, defaults of its OpenAI server by GPU memory",
    "blocks": f"vLLM's planner at {UTILISATION:.0%} of memory, less {WORKING_BYTES >> 30} GiB a GPU (assumed)",
}
PRESETS = (
    "llama-3.1-8b@h100",
    "llama-3.1-8b@a100-80gb",
    "llama-3.1-8b@l40s",
    "llama-3.3-70b@4xh100",
    "llama-3.3-70b@2xh200",
    "qwen2.5-7b@h100",
    "qwen3-8b@h100",
    "qwen3-32b@2xh100",
    "qwen3-30b-a3b@h100",
    "qwen3-235b-a22b@8xh200",
    "mistral-small-24b@h100",
    "gemma-3-27b@h100",
    "gpt-oss-20b@h100",
    "gpt-oss-120b@2xh100",
    "deepseek-v3@8xh200",
)


class EngineFigures(Struct, frozen=True, kw_only=True):
    """What a simulation needs to know of one engine."""

    name: str
    time: RooflineTime
    limits: Limits
    block_size: int  # tokens
    num_blocks: int  # the null block included
    max_model_len: int
    offload: Offload | None  # CPU memory behind the cache, where some was given
    sources: dict[str, str]  # what the figures rest on

    @property
    def kv_tokens(self) -> int:
        """Tokens that its cache holds."""
        return (self.num_blocks - 1) * self.block_size


def engine_figures(
    name: str, *, block_size: int = 16, max_model_len: int | None = None, cpu_bytes: int = 0
) -> EngineFigures:
    """Work out an engine by its name, with `cpu_bytes` of CPU memory behind its cache.

    Raises:
        ConfigError: the name cannot be read, model or GPU is not known, or the model does not fit.
    """
    model, hardware, gpus = _parts(name)
    parallel = Parallel(tp=gpus)
    context = max_model_len or min(model.context_tokens or CONTEXT_TOKENS, CONTEXT_TOKENS)
    limits = limits_of(hardware)
    tokens = _cache_tokens(
        model,
        hardware,
        Settings(
            max_model_len=context,
            block_size=block_size,
            element_bytes=model.element_bytes,
            parallel=parallel,
            batched_tokens=limits.max_num_batched_tokens,
        ),
    )
    if tokens < max(context, block_size):
        raise ConfigError(
            f"{name}: its cache holds {tokens:,} tokens, less than one conversation of {context:,}; "
            f"name more GPUs ({model.name}@{2 * gpus}x{hardware.name}) or a smaller max_model_len"
        )
    return EngineFigures(
        name=name,
        time=RooflineTime(model, hardware, parallel=parallel, eight_bit=computes_in_8_bits(model)),
        limits=limits,
        block_size=block_size,
        num_blocks=tokens // block_size + 1,
        max_model_len=context,
        offload=offload_of(model, hardware, parallel, block_size, cpu_bytes) if cpu_bytes else None,
        sources={"model": MODELS[model.name].source, "hardware": hardware.source, **SOURCES},
    )


def limits_of(hardware: Hardware) -> Limits:
    """Return the limits that vLLM's server takes on this GPU."""
    memory = hardware.memory_bytes / GIB
    if memory >= 160:
        return Limits(max_num_batched_tokens=16_384, async_scheduling=True)
    if memory >= 70 and not hardware.name.startswith("a100"):
        return Limits(async_scheduling=True)
    return Limits(max_num_batched_tokens=2_048, max_num_seqs=256, async_scheduling=True)


def offload_of(model: Model, hardware: Hardware, parallel: Parallel, block_size: int, cpu_bytes: int) -> Offload:
    """Return what `cpu_bytes` of CPU memory hold, and how long a block takes back.

    Raises:
        ConfigError: the memory is less than one block.
    """
    block_bytes = kv_bytes(model, block_size)
    if cpu_bytes < block_bytes:
        raise ConfigError(f"CPU memory: {cpu_bytes:,} bytes are less than one block of {block_bytes:,}")
    cpu = next(tier for tier in tiers(hardware) if tier.name == "cpu")
    return Offload(cpu_bytes // block_bytes, round(copy_s(model, block_size, cpu, parallel=parallel) * FS))


def _parts(name: str) -> tuple[Model, Hardware, int]:
    model, at, machine = name.partition("@")
    if not at or not model or not machine:
        raise ConfigError(f"{name!r} is not MODEL@GPU or MODEL@NxGPU, such as {PRESETS[0]}")
    count, times, kind = machine.partition("x")
    if not times or not count.isdigit():
        return preset(model), gpu(machine), 1
    if not 1 <= int(count) <= GPUS_LIMIT:
        raise ConfigError(f"{name!r}: the number of GPUs must be from 1 to {GPUS_LIMIT}")
    return preset(model), gpu(kind), int(count)


def _cache_tokens(model: Model, hardware: Hardware, settings: Settings) -> int:
    """Tokens of cache as vLLM reports them, which for layers with a window or a state says how many it is worth."""
    budget = Budget(
        gpu_bytes=hardware.memory_bytes,
        weights_bytes=model.weights.total_bytes if model.weights else 0,
        parallel=settings.parallel,
        utilisation=UTILISATION,
        working_bytes=WORKING_BYTES,
    )
    return plan(model, budget.per_gpu_bytes, settings).tokens if budget.per_gpu_bytes > 0 else 0
