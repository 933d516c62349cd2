"""Whether the token count in a start-up log is what its configuration gives, and what is likely wrong where it is low.

The count is recomputed from the memory that the log itself reports, so a difference means another shape, dtype or
setting than was assumed. Whether that memory is what the GPU should have left is a second question, answered where the
GPU is known. What an engine was not asked to print is assumed at vLLM's defaults, and said.
"""

from __future__ import annotations

from msgspec import Struct
from msgspec.structs import replace

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import Parallel, cache_bytes, kv_bytes_per_gpu
from kvroute.sizing.engine_log import ROUNDING_BYTES, EngineLog
from kvroute.sizing.hardware import Hardware
from kvroute.sizing.model import Model
from kvroute.sizing.planner import Plan, Settings, check, longest_start, plan

GROUP_AWARE_SINCE = (0, 22)  # releases before shared blocks evenly among groups when they reported tokens
UTILISATION_DEFAULT = 0.92
UTILISATION_LOW = 0.85
BLOCK_SIZES = {"CPU": 128}  # by device; 16 elsewhere
WEIGHTS_TOLERANCE = 1.10


class Verdict(Struct, frozen=True, kw_only=True):
    """What was reported against what it should be. `agrees` is None where the log has too little to tell."""

    agrees: bool | None
    reported_tokens: int | None
    expected_tokens: tuple[int, int] | None  # least and most, as far as the log's rounding allows
    plan: Plan | None = None
    findings: tuple[str, ...] = ()  # likely causes and remedies
    assumed: tuple[str, ...] = ()


def settings_of(log: EngineLog, model: Model) -> tuple[Settings, list[str]]:
    """Return the engine's settings and what had to be assumed.

    Raises:
        ConfigError: the cache's dtype is not known.
    """
    assumed = []
    length = log.max_model_len or model.context_tokens
    if length is None:
        raise ConfigError("neither the log nor the model says how long a conversation may be: give --max-model-len")
    block = log.block_size or BLOCK_SIZES.get(log.device or "GPU", 16)
    if log.block_size is None:
        assumed.append(f"block size {block}, the default there")
    if log.batched_tokens is None and any(cache.is_bounded for cache in model.caches):
        assumed.append("8,192 batched tokens, the default of large GPUs; it decides what window layers hold in flight")
    settings = Settings(
        max_model_len=length,
        block_size=block,
        element_bytes=cache_bytes(log.cache_dtype or "auto", model),
        parallel=Parallel(tp=log.tp, pp=log.pp, dcp=log.dcp),
        batched_tokens=log.batched_tokens or 8_192,
        batches_in_flight=log.pp if log.asynchronous is False or log.pp > 1 else 2,
        hybrid=log.hybrid,
        prefix_caching=log.prefix_caching is not False,
        blocks_override=log.blocks_override,
    )
    return settings, assumed


def judge(log: EngineLog, model: Model, hardware: Hardware | None = None) -> Verdict:
    """Compare a log with the model that it is said to be of.

    Raises:
        ConfigError: the model or the settings in the log cannot be planned.
    """
    settings, assumed = settings_of(log, model)
    check(settings)
    findings = _settings_findings(log, model, settings)
    if hardware is not None:
        findings += _memory_findings(log, model, hardware)
    if log.tokens is None:
        findings.insert(0, _no_count(log, model, settings))
    elif log.available_bytes is None:
        findings.insert(0, "the log does not say how much memory the cache got, so the count cannot be redone")
    if log.tokens is None or log.available_bytes is None:
        return Verdict(
            agrees=None,
            reported_tokens=log.tokens,
            expected_tokens=None,
            findings=tuple(findings),
            assumed=tuple(assumed),
        )
    slack = 0 if log.available_exact else ROUNDING_BYTES
    least, most = (plan(model, log.available_bytes + off, settings) for off in (-slack, slack))
    expected = (_tokens(least, log), _tokens(most, log))
    agrees = expected[0] <= log.tokens <= expected[1]
    if not agrees:
        findings.insert(0, _difference(log, model, settings, expected))
    return Verdict(
        agrees=agrees,
        reported_tokens=log.tokens,
        expected_tokens=expected,
        plan=most,
        findings=tuple(findings),
        assumed=tuple(assumed),
    )


def _tokens(planned: Plan, log: EngineLog) -> int:
    old = log.release is not None and log.release < GROUP_AWARE_SINCE
    return planned.tokens_before_0_22 if old else planned.tokens


def _no_count(log: EngineLog, model: Model, settings: Settings) -> str:
    if log.available_bytes is None:
        return "the log has no line with the size of the KV cache: it ends too early, or it is not a start-up log"
    if log.available_bytes <= 0:
        return "nothing is left for the cache: the weights and the working memory take all of the engine's share"
    longest = longest_start(model, log.available_bytes, settings)
    return (
        f"the engine did not get as far as reporting its cache; with {log.available_bytes / 2**30:.2f} GiB it starts "
        f"up to --max-model-len {longest:,}"
    )


def _difference(log: EngineLog, model: Model, settings: Settings, expected: tuple[int, int]) -> str:
    """Name the single other setting that would explain the count, if there is one."""
    assert log.tokens is not None
    assert log.available_bytes is not None
    ratio = log.tokens / max(1, expected[1])
    for change, words in _alternatives(settings):
        other = plan(model, log.available_bytes, change)
        if abs(_tokens(other, log) - log.tokens) <= 0.005 * log.tokens:
            return f"the count is the one of {words}"
    if not log.tokens:
        return "the engine reported a cache of no tokens at all"
    each = log.available_bytes / log.tokens
    ours = kv_bytes_per_gpu(model, settings.max_model_len, settings.parallel, settings.element_bytes)
    return (
        f"the engine spends {each:,.0f} bytes a token and GPU, this model's shape {ours / settings.max_model_len:,.0f} "
        f"({ratio:.2f} times the expected tokens): another model, a draft model's layers, or another cache dtype"
    )


def _alternatives(settings: Settings) -> list[tuple[Settings, str]]:
    other_size = 1 if settings.element_bytes > 1 else 2
    return [
        (replace(settings, element_bytes=other_size), f"a cache of {8 * other_size}-bit numbers"),
        (replace(settings, hybrid=False), "window layers kept whole (the hybrid cache manager is off)"),
        (replace(settings, parallel=Parallel()), "one GPU instead of the parallelism in the log"),
        (replace(settings, batches_in_flight=1), "one batch in flight (no asynchronous scheduling)"),
        (replace(settings, batched_tokens=2_048), "2,048 batched tokens"),
        (replace(settings, prefix_caching=False), "prefix caching switched off"),
    ]


def _settings_findings(log: EngineLog, model: Model, settings: Settings) -> list[str]:
    findings = []
    if log.blocks_override is not None:
        findings.append(f"--num-gpu-blocks-override {log.blocks_override:,} sets the size, whatever memory there is")
    if not log.hybrid and any(cache.is_bounded for cache in model.caches):
        findings.append("the hybrid cache manager is off: window layers take as much as full ones")
    heads = max((getattr(cache, "kv_heads", 0) for cache in model.caches), default=0)
    if 0 < heads < log.tp:
        findings.append(
            f"{log.tp} GPUs share {heads} KV heads: each head is kept {log.tp // heads} times; "
            f"--decode-context-parallel-size {log.tp // heads} would spread tokens instead"
        )
    if heads == 0 and log.tp > 1 and log.dcp == 1:
        findings.append(
            f"latent attention is kept whole on each of {log.tp} GPUs; "
            f"--decode-context-parallel-size {log.tp} would spread it"
        )
    if log.max_concurrency is not None and log.max_concurrency < 1:
        findings.append(f"a conversation of {settings.max_model_len:,} tokens does not fit: shorten --max-model-len")
    return findings


def _memory_findings(log: EngineLog, model: Model, hardware: Hardware) -> list[str]:
    """Where the GPU's memory went."""
    findings = []
    share = log.utilisation or UTILISATION_DEFAULT
    if share < UTILISATION_LOW:
        more = round((UTILISATION_DEFAULT - share) * hardware.memory_bytes / 1e9, 1)
        findings.append(
            f"--gpu-memory-utilization is {share}: at {UTILISATION_DEFAULT} the cache has {more} GB more a GPU"
        )
    planned = model.weights.total_bytes / (log.tp * log.pp) if model.weights else None
    if log.weights_bytes and planned and log.weights_bytes > WEIGHTS_TOLERANCE * planned:
        findings.append(
            f"the weights take {log.weights_bytes / 1e9:.1f} GB a GPU instead of {planned / 1e9:.1f}: "
            "not quantised as the configuration says, or other models beside it"
        )
    weights = log.weights_bytes or planned
    if weights and log.available_bytes is not None and not log.available_exact:
        rest = share * hardware.memory_bytes - weights - log.available_bytes
        graphs = f", {log.graphs_bytes / 1e9:.1f} of them CUDA graphs" if log.graphs_bytes else ""
        findings.append(
            f"{rest / 1e9:.1f} GB a GPU went to neither weights nor cache (activations, other uses{graphs})"
        )
        if rest > 0.15 * hardware.memory_bytes:
            findings.append(
                "that is much: another process on the GPU, a large --max-num-batched-tokens, or images of the largest "
                "size that is allowed (--limit-mm-per-prompt)"
            )
    return findings
