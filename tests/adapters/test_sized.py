"""What is expected of a replica before it has said anything."""

import pytest

from kvroute.adapters.sized import sized
from kvroute.errors import ConfigError
from kvroute.sizing.capacity import kv_bytes_per_token
from kvroute.sizing.hardware import gpu
from kvroute.sizing.presets import preset


def test_preset_by_repository_name():
    """A model that is known by its repository's name is sized without any file."""
    found = sized("meta-llama/Llama-3.1-8B-Instruct", "chat", "h100", 1)
    model, hardware = preset("llama-3.1-8b"), gpu("h100")
    room = hardware.memory_bytes * 0.92 - model.weights.total_bytes
    assert found.capacity_tokens == pytest.approx(room / kv_bytes_per_token(model), rel=0.01)


def test_more_gpus_are_faster_and_hold_more():
    """Four GPUs a replica give more room and quicker prefill than one."""
    one, four = (sized(None, "qwen3-32b", "h100", count) for count in (1, 4))
    assert four.capacity_tokens > 4 * one.capacity_tokens
    assert four.rates.token_s < one.rates.token_s / 2
    assert four.rates.step_s < one.rates.step_s


def test_unknown_model_claims_nothing():
    """A name that says nothing about a shape gives no figures."""
    assert sized("my-model", "my-model", "h100", 1) is None


def test_unknown_gpu_is_refused():
    """A GPU that is not known is refused with the known ones."""
    with pytest.raises(ConfigError, match="h100"):
        sized("my-model", "my-model", "h1000", 1)
