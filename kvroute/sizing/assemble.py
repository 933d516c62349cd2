"""From a model, GPUs and wishes to a report: each figure from its own module, and the warnings that follow."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import (
    Budget,
    cache_bytes,
    conversations_of_mix_on,
    conversations_on,
    kv_bytes,
    kv_bytes_per_token,
    kv_bytes_per_token_unbounded,
    mix_bytes,
    shared_prefix_bytes,
    state_bytes,
    tokens_on,
)
from kvroute.sizing.explain import explain
from kvroute.sizing.hardware import Hardware
from kvroute.sizing.model import Model
from kvroute.sizing.planner import GPUS_LIMIT, NoPlanError, Settings, check, longest_start, plan
from kvroute.sizing.report import LENGTHS, Decode, Fit, Length, Machine, Planned, Prefill, Report, Wishes
from kvroute.sizing.speed import computes_in_8_bits, copy_pays_from_tokens, copy_s, decode_step_s, prefill_s, tiers

TOKENS_LIMIT = 100_000_000


def report_of(model: Model, hardware: Sequence[Hardware], wishes: Wishes) -> Report:
    """Size a model on each of the GPUs.

    Raises:
        ConfigError: a wish is out of range, or the model lacks what it needs.
    """
    _check(wishes)
    if wishes.parallel.pp > len(model.layers):
        raise ConfigError(f"--pp: {wishes.parallel.pp} stages are more than the model's {len(model.layers)} layers")
    size = cache_bytes(wishes.cache_dtype, model)
    if wishes.weights_bytes is not None and model.weights is not None:
        model = _with_weights(model, wishes.weights_bytes)
    weights = model.weights
    lengths = _lengths(model, wishes)
    sized = _weights_bytes(model, wishes) is not None
    return Report(
        model=model.name,
        family=model.family,
        kv_bytes_per_token=kv_bytes_per_token(model, size),
        kv_bytes_per_token_all_layers=kv_bytes_per_token_unbounded(model, size),
        state_bytes_per_sequence=state_bytes(model),
        cache_dtype=wishes.cache_dtype,
        layers=len(model.layers),
        full_layers=sum(not cache.is_bounded for cache in model.caches),
        window_layers=sum(cache.is_bounded and cache.bytes_per_token(1) > 0 for cache in model.caches),
        state_layers=sum(cache.fixed_bytes() > 0 for cache in model.caches),
        context_tokens=model.context_tokens,
        parameters=weights.parameters if weights else None,
        active_parameters=weights.active_parameters if weights else None,
        weights_bytes=_weights_bytes(model, wishes),
        lengths=tuple(
            Length(tokens, kv_bytes(model, tokens, size), kv_bytes(model, tokens, size, windows=False))
            for tokens in lengths
        ),
        mix_bytes=round(mix_bytes(model, wishes.mix, size)) if wishes.mix else None,
        shared_prefix_bytes=shared_prefix_bytes(model, wishes.users, wishes.prefix_tokens, size)
        if wishes.users and wishes.prefix_tokens
        else None,
        machines=tuple(_machine(model, one, wishes, lengths, size) for one in hardware) if sized else (),
        notes=model.notes
        if sized
        else (*model.notes, "what fits on a GPU is not computed: give the weights' size with --weights"),
    )


def _check(wishes: Wishes) -> None:
    for name, values, least in (
        ("context", wishes.lengths, 1),
        ("batch", wishes.batches, 1),
        ("max-model-len", (wishes.max_model_len or 1,), 1),
        ("prefix-tokens", (wishes.prefix_tokens,), 0),
        ("users", (wishes.users,), 0),
        ("mix", tuple(part.tokens for part in wishes.mix), 0),
    ):
        for value in values:
            if not least <= value <= TOKENS_LIMIT:
                raise ConfigError(f"--{name}: {value} is out of range; from {least} to {TOKENS_LIMIT:,}")
    if not 0 < wishes.utilisation <= 1:
        raise ConfigError(f"--utilisation: {wishes.utilisation} must be above 0 and at most 1, such as 0.92")
    spread = wishes.parallel
    if min(spread.tp, spread.pp, spread.dp) < 1 or spread.gpus > GPUS_LIMIT:
        raise ConfigError(f"--tp, --pp, --dp: their product must be from 1 to {GPUS_LIMIT:,}, and each 1 or more")
    if (wishes.weights_bytes or 0) < 0 or wishes.working_bytes < 0:
        raise ConfigError("--weights, --working: memory cannot be negative")


def _with_weights(model: Model, total_bytes: int) -> Model:
    return replace(model, weights=model.weights.resized(total_bytes) if model.weights else None)


def _weights_bytes(model: Model, wishes: Wishes) -> int | None:
    if wishes.weights_bytes is not None:
        return wishes.weights_bytes
    return model.weights.total_bytes if model.weights else None


def _lengths(model: Model, wishes: Wishes) -> tuple[int, ...]:
    """The wished lengths; of the usual ones only those that the model's context allows."""
    if wishes.lengths != LENGTHS or model.context_tokens is None:
        return wishes.lengths
    allowed = tuple(tokens for tokens in LENGTHS if tokens <= model.context_tokens)
    return allowed or (model.context_tokens,)


def _machine(model: Model, hardware: Hardware, wishes: Wishes, lengths: tuple[int, ...], size: int) -> Machine:
    budget = Budget(
        gpu_bytes=hardware.memory_bytes,
        weights_bytes=_weights_bytes(model, wishes) or 0,
        parallel=wishes.parallel,
        utilisation=wishes.utilisation,
        working_bytes=wishes.working_bytes,
    )
    settings = _settings(model, wishes, lengths, size)
    check(settings)
    no_plan: tuple[str, ...] = ()
    try:
        planned = _planned(model, settings, budget.per_gpu_bytes)
    except NoPlanError as error:
        planned, no_plan = None, (f"no plan: {error.message}",)
    fits = tuple(_fit(budget, model, tokens, size) for tokens in lengths)
    return Machine(
        gpu=hardware.name,
        gpus=wishes.parallel.gpus,
        parallel=wishes.parallel,
        source=hardware.source,
        per_gpu_bytes=budget.per_gpu_bytes,
        usable_bytes=budget.usable_bytes * wishes.parallel.dp,
        capacity_tokens=tokens_on(budget, model, size),
        fits=fits,
        mix_conversations=conversations_of_mix_on(budget, model, wishes.mix, size) if wishes.mix else None,
        vllm=planned,
        decode=_decode(model, hardware, wishes, fits, size),
        prefill=_prefill(model, hardware, wishes, lengths, size),
        copy_pays_from_tokens=_copy_pays(model, hardware, wishes, size),
        warnings=(*_warnings(model, budget, fits, planned), *no_plan),
    )


def _settings(model: Model, wishes: Wishes, lengths: tuple[int, ...], size: int) -> Settings:
    return Settings(
        max_model_len=wishes.max_model_len or model.context_tokens or max(lengths),
        block_size=wishes.block_size,
        element_bytes=size,
        parallel=wishes.parallel,
        batched_tokens=wishes.batched_tokens,
        batches_in_flight=2 if wishes.parallel.pp == 1 else wishes.parallel.pp,
        hybrid=wishes.hybrid,
    )


def _planned(model: Model, settings: Settings, available_bytes: int) -> Planned | None:
    if available_bytes <= 0:
        return None
    made = plan(model, available_bytes, settings)
    return Planned(
        max_model_len=settings.max_model_len,
        starts=made.starts,
        longest_start=longest_start(model, available_bytes, settings),
        tokens=made.tokens,
        max_concurrency=made.max_concurrency,
        blocks=made.blocks,
        block_size=made.block_size,
        bytes_per_block=made.bytes_per_block,
        groups=len(made.groups),
        differs=explain(model, made, settings, available_bytes),
    )


def _fit(budget: Budget, model: Model, tokens: int, size: int) -> Fit:
    return Fit(
        tokens=tokens,
        conversations=conversations_on(budget, model, tokens, size),
        conversations_fp8=conversations_on(budget, model, tokens, 1),
        conversations_all_layers=conversations_on(budget, model, tokens, size, windows=False),
    )


def _decode(model: Model, hardware: Hardware, wishes: Wishes, fits: tuple[Fit, ...], size: int) -> tuple[Decode, ...]:
    if not hardware.bandwidth_bytes_s or model.weights is None:
        return ()
    rows = []
    for fit in fits:
        for batch in wishes.batches:
            step = decode_step_s(
                model, hardware, batch=batch, tokens=fit.tokens, parallel=wishes.parallel, element_bytes=size
            )
            rows.append(Decode(batch, fit.tokens, step, 1 / step, batch * wishes.parallel.dp <= fit.conversations))
    return tuple(rows)


def _prefill(
    model: Model, hardware: Hardware, wishes: Wishes, lengths: tuple[int, ...], size: int
) -> tuple[Prefill, ...]:
    if not hardware.flops or model.weights is None:
        return ()
    spread, eight_bit = wishes.parallel, computes_in_8_bits(model)
    return tuple(
        Prefill(
            tokens,
            prefill_s(model, hardware, tokens, parallel=spread, eight_bit=eight_bit, quadratic=False),
            prefill_s(model, hardware, tokens, parallel=spread, eight_bit=eight_bit),
            {tier.name: copy_s(model, tokens, tier, size, parallel=spread) for tier in tiers(hardware)},
        )
        for tokens in lengths
    )


def _copy_pays(model: Model, hardware: Hardware, wishes: Wishes, size: int) -> dict[str, int | None]:
    if not hardware.flops or model.weights is None:
        return {}
    spread = wishes.parallel
    return {tier.name: copy_pays_from_tokens(model, hardware, tier, size, parallel=spread) for tier in tiers(hardware)}


def _warnings(model: Model, budget: Budget, fits: tuple[Fit, ...], planned: Planned | None) -> tuple[str, ...]:
    if budget.per_gpu_bytes <= 0:
        need = _gpus_needed(budget)
        return (f"does not load: the weights need at least {need} of these GPUs (try --tp {need})",)
    warnings = []
    none = [fit.tokens for fit in fits if not fit.conversations]
    if none:
        warnings.append(f"loads, but cannot serve one conversation of {min(none):,} tokens or more")
    if planned is not None and not planned.starts:
        warnings.append(f"vLLM refuses to start with --max-model-len {planned.max_model_len:,}")
    if planned is not None and model.context_tokens and planned.max_model_len > model.context_tokens:
        warnings.append(
            f"--max-model-len {planned.max_model_len:,} is more than the model's context of {model.context_tokens:,}: "
            "vLLM refuses it without rope scaling"
        )
    if model.query_heads % budget.parallel.tp:
        warnings.append(
            f"--tp {budget.parallel.tp} does not divide the {model.query_heads} query heads: vLLM refuses it"
        )
    heads = max((getattr(cache, "kv_heads", 0) for cache in model.caches), default=0)
    if 0 < heads < budget.parallel.tp and budget.parallel.dcp == 1:
        them = "one KV head" if heads == 1 else f"{heads} KV heads"
        warnings.append(f"--tp {budget.parallel.tp} repeats the model's {them}: more GPUs save no cache past {heads}")
    if heads == 0 and budget.parallel.tp > 1 and budget.parallel.dcp == 1 and model.caches:
        warnings.append("latent attention is kept whole on every GPU of --tp; --dcp spreads its tokens")
    return tuple(warnings)


def _gpus_needed(budget: Budget) -> int:
    """The least power of two of GPUs on which the weights leave room."""
    room = budget.gpu_bytes * budget.utilisation - budget.working_bytes
    count = budget.parallel.tp * budget.parallel.pp
    while count < GPUS_LIMIT and (room <= 0 or budget.weights_bytes / count >= room):
        count *= 2
    return count
