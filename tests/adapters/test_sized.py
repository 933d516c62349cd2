"""What is expected of a replica before it has said anything."""

import pytest

from kvroute.adapters.sized import sized
from kvroute.errors import ConfigError
from kvroute.routing.rates import Rates
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


def test_latent_attention_holds_what_one_gpu_holds():
    """Every GPU keeps the whole latent cache, so more GPUs add only what the weights leave free on each."""
    model, hardware = preset("deepseek-v3"), gpu("h200")
    found = sized(None, "deepseek-v3", "h200", 8)
    room = hardware.memory_bytes * 0.92 - model.weights.total_bytes / 8
    assert found.capacity_tokens == pytest.approx(room / kv_bytes_per_token(model), rel=0.01)


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b", "gemma-3-27b"])
def test_every_rate_that_follows_from_shape_and_gpu_is_computed(name):
    """Nothing that model and GPU decide stays what is assumed without them; overhead and adapters do."""
    assumed, found = Rates(), sized(None, name, "h200", 8).rates
    assert [field for field in Rates.__struct_fields__ if getattr(found, field) == getattr(assumed, field)] == [
        "fixed_s",
        "adapter_s",
    ]


def test_a_copy_from_cpu_memory_is_priced_by_the_links_of_all_gpus():
    """Each GPU brings its own part of the cache back over its own link."""
    one, four = (sized(None, "llama-3.3-70b", "h200", count).rates.copy_token_s for count in (2, 8))
    assert one == pytest.approx(4 * four)
    assert one == pytest.approx(kv_bytes_per_token(preset("llama-3.3-70b")) / 2 / gpu("h200").host_bytes_s)


def test_unknown_model_claims_nothing():
    """A name that says nothing about a shape gives no figures."""
    assert sized("my-model", "my-model", "h100", 1) is None


def test_unknown_gpu_is_refused():
    """A GPU that is not known is refused with the known ones."""
    with pytest.raises(ConfigError, match="h100"):
        sized("my-model", "my-model", "h1000", 1)
