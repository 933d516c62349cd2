"""The published shapes, against the published sizes of the models."""

import pytest

from kvroute.errors import ConfigError
from kvroute.sizing.presets import PRESETS, preset

BILLIONS = {  # parameters as their publishers state them; total, and active where that is stated
    "llama-3-8b": (8.03, None),
    "llama-3.1-70b": (70.6, None),
    "llama-3.1-405b": (405.9, None),
    "llama-3.2-1b": (1.24, None),
    "llama-3.2-3b": (3.21, None),
    "llama-4-scout": (109, 17),
    "llama-4-maverick": (400, 17),
    "qwen2.5-7b": (7.61, None),
    "qwen2.5-32b": (32.5, None),
    "qwen2.5-72b": (72.7, None),
    "qwen3-8b": (8.2, None),
    "qwen3-32b": (32.8, None),
    "qwen3-30b-a3b": (30.5, 3.3),
    "qwen3-235b-a22b": (235, 22),
    "qwen3-coder-480b": (480, 35),
    "qwen3-next-80b": (80, None),
    "qwen3.5-397b-a17b": (397, 17),
    "mistral-7b": (7.25, None),
    "mistral-small-24b": (23.6, None),
    "mistral-large-123b": (123, None),
    "mixtral-8x7b": (46.7, 12.9),
    "mixtral-8x22b": (141, 39),
    "gemma-2-9b": (9.24, None),
    "gemma-2-27b": (27.2, None),
    "gemma-3-27b": (27, None),
    "phi-4": (14.7, None),
    "phi-3-mini-4k": (3.8, None),
    "gpt-oss-20b": (20.9, None),
    "gpt-oss-120b": (116.8, None),
    "deepseek-v2": (236, 21),
    "deepseek-v2-lite": (15.7, None),
    "deepseek-v3": (671, 37),
    "deepseek-v4-flash": (284, 13),
    "deepseek-v4-pro": (1_573, 49),
    "kimi-k2": (1_026, 32),
    "glm-4.5": (355, 32),
    "glm-4.5-air": (106, None),
    "glm-5": (744, 40),
    "minimax-m2": (230, None),
    "command-r": (32.3, None),
    "command-r-plus": (104, None),
    "command-r7b": (8.03, None),
    "command-a": (111, None),
    "exaone-4.0-32b": (32, None),
    "nemotron-nano-9b-v2": (8.9, None),
    "nemotron-3-nano-30b": (31.6, 3.5),
    "jamba-1.5-mini": (52, 12),
    "opt-13b": (12.85, None),
}


@pytest.mark.parametrize("name", sorted(BILLIONS))
def test_parameters_follow_from_the_shape(name):
    """A shape whose parameter count is within 2 % of the published one is the published shape (active: 6 %)."""
    weights = preset(name).weights
    total, active = BILLIONS[name]
    assert weights.parameters / 1e9 == pytest.approx(total, rel=0.02)
    if active is not None:
        assert weights.active_parameters / 1e9 == pytest.approx(active, rel=0.06)


def test_enough_models_are_known():
    """At least 25 published models, each with its source."""
    assert len(PRESETS) >= 25
    assert all(one.source.count("/") == 1 for one in PRESETS.values())


def test_quantised_checkpoints_weigh_what_they_do():
    """MXFP4 quantises only the experts: gpt-oss-120b is 65 GB, 20b 13.8 GB; DeepSeek-V3 is one byte a parameter."""
    assert preset("gpt-oss-120b").weights.total_bytes / 1e9 == pytest.approx(65.2, rel=0.01)
    assert preset("gpt-oss-20b").weights.total_bytes / 1e9 == pytest.approx(13.8, rel=0.01)
    assert preset("deepseek-v3").weights.total_bytes / 1e9 == pytest.approx(671, rel=0.01)
    assert preset("deepseek-v4-pro").weights.expert_bytes / 1e9 == pytest.approx(822.05, rel=0.001)
    assert preset("deepseek-v4-flash").weights.expert_bytes / 1e9 == pytest.approx(147.17, rel=0.001)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "LLAMA-3.1-8B", "meta-llama/Llama-3.1-8B"])
def test_a_preset_has_several_names(name):
    """Short name or repository, in any case."""
    assert preset(name).name == "llama-3.1-8b"


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b-instruct"])
def test_a_tuned_sibling_is_sized_as_its_base(name):
    """It shares the shape, and a note says that this was assumed."""
    model = preset(name)
    assert model.name == "llama-3.1-8b"
    assert model.notes == (f"{name} is taken to have the shape of meta-llama/Llama-3.1-8B",)


def test_an_unknown_name_lists_its_relatives():
    """A near miss is answered with the names that resemble it."""
    with pytest.raises(ConfigError, match="qwen3-8b"):
        preset("qwen3-9b")


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_presets_leave_nothing_to_guess(name):
    """No preset needs an assumption about its cache."""
    assert not [note for note in preset(name).notes if "assumed" in note or "no field says" in note]
