"""What arithmetic says about a replica before it has said or shown anything: how much its cache holds, how fast it is.

From the model's published shape (its folder on this machine, or a preset by its repository's name) and the GPU that the
settings name. Without either nothing is claimed.
"""

from __future__ import annotations

from math import inf

from msgspec import Struct

from kvroute.adapters.size_io import read_model
from kvroute.errors import ConfigError
from kvroute.routing.rates import SEED_FIXED_S, Rates
from kvroute.sizing.capacity import Budget, Parallel, tokens_on
from kvroute.sizing.hardware import Hardware, gpu
from kvroute.sizing.model import Model
from kvroute.sizing.speed import copy_s, prefill_operations, seeds, tiers

TYPICAL_CONTEXT = 8_000  # tokens, where a rate depends on the length
UTILISATION = 0.92  # vLLM's own default since 0.19


class Sized(Struct, frozen=True):
    """What to expect of a replica."""

    rates: Rates
    capacity_tokens: int


def sized(model_root: str | None, model_name: str, gpu_name: str, tensor_parallel: int) -> Sized | None:
    """Size a replica; None where the model's shape or the size of its weights is not known.

    Raises:
        ConfigError: there is no GPU of that name; the message lists those that are known.
    """
    hardware = gpu(gpu_name)
    model = _model(model_root) or _model(model_name)
    if model is None or model.weights is None:
        return None
    parallel = Parallel(tp=tensor_parallel)
    return Sized(_rates(model, hardware, parallel), _capacity(model, hardware, parallel, model.weights.total_bytes))


def _rates(model: Model, hardware: Hardware, parallel: Parallel) -> Rates:
    known = seeds(model, hardware, parallel=parallel)
    linear, attention = prefill_operations(model, 1, TYPICAL_CONTEXT)
    return Rates(
        SEED_FIXED_S,
        1 / known.prefill_tokens_s,
        known.step_s,
        sequence_growth=known.step_s_per_sequence / known.step_s,
        kv_growth=known.step_s_per_token / known.step_s,
        attention_tokens=TYPICAL_CONTEXT * linear / attention if attention else inf,
        copy_token_s=copy_s(model, TYPICAL_CONTEXT, tiers(hardware)[0], parallel=parallel) / TYPICAL_CONTEXT,
    )


def _capacity(model: Model, hardware: Hardware, parallel: Parallel, weights_bytes: int) -> int:
    budget = Budget(
        gpu_bytes=hardware.memory_bytes, weights_bytes=weights_bytes, parallel=parallel, utilisation=UTILISATION
    )
    return tokens_on(budget, model, typical_tokens=TYPICAL_CONTEXT)


def _model(name: str | None) -> Model | None:
    if not name or name.startswith(("http://", "https://")):
        return None
    try:
        return read_model(name)
    except ConfigError:
        return None
