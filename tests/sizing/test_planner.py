"""Plans of caches. tests/vllm/test_planner.py compares them with vLLM's own planner."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import Parallel, conversations, kv_bytes_per_gpu
from kvroute.sizing.planner import Settings, longest_start, plan
from kvroute.sizing.presets import PRESETS, preset

GIB = 2**30
LONG = Settings(max_model_len=131_072)
PLANNED = [name for name in sorted(PRESETS) if all(cache.stride == 1 for cache in preset(name).caches)]


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("llama-3.1-8b", {}, (2_097_152, 5_120, 8_192, 0.62, 81_920)),
        ("llama-3.1-8b", {"element_bytes": 1}, (1_048_576, 10_240, 8_192, 1.25, 163_840)),
        ("llama-3.1-70b", {"parallel": Parallel(tp=8)}, (655_360, 16_384, 8_192, 2.00, 262_144)),
        ("gpt-oss-20b", {}, (393_216, 27_306, 8_192 + 1_033, 2.96, 387_973)),
        ("gemma-3-27b", {}, (1_310_720, 8_192, 8_192 + 6 * 1_089, 0.56, 72_914)),
    ],
)
def test_ten_gib_a_gpu(name, changes, expected):
    """Bytes a block, blocks, blocks a request, concurrency and tokens as vLLM 0.33 computed them."""
    made = plan(preset(name), 10 * GIB, structs.replace(LONG, **changes))
    found = (made.bytes_per_block, made.blocks, made.blocks_per_request, round(made.max_concurrency, 2), made.tokens)
    assert found == expected


def test_context_parallelism_halves_a_conversation():
    """Each of two ranks keeps half of the tokens: half the blocks a request, twice the tokens."""
    single = plan(preset("deepseek-v3"), 10 * GIB, structs.replace(LONG, parallel=Parallel(tp=2)))
    double = plan(preset("deepseek-v3"), 10 * GIB, structs.replace(LONG, parallel=Parallel(tp=2, dcp=2)))
    assert double.blocks == single.blocks
    assert double.blocks_per_request * 2 == single.blocks_per_request
    assert double.tokens == pytest.approx(2 * single.tokens, rel=1e-4)


def test_the_published_start_up_line():
    """396,272 tokens of Llama 3 8B are 51.9 GB in 24,767 blocks, 24.19 times 16,384 tokens."""
    made = plan(preset("llama-3-8b"), 396_272 * 131_072, Settings(max_model_len=16_384))
    assert (made.blocks, made.tokens, round(made.max_concurrency, 2)) == (24_767, 396_272, 24.19)
    assert round(396_272 * 131_072 / 1e9, 1) == 51.9


def test_older_releases_shared_blocks_evenly():
    """Until 0.22 the tokens of a hybrid were blocks over groups, times a block."""
    made = plan(preset("gpt-oss-20b"), 10 * GIB, LONG)
    assert made.tokens_before_0_22 == 27_306 // 2 * 16


def test_override_and_start():
    """An override sets the blocks; an engine starts where one conversation fits beside block 0."""
    settings = Settings(max_model_len=160, blocks_override=11)
    assert plan(preset("llama-3-8b"), GIB, settings).blocks == 11
    assert plan(preset("llama-3-8b"), GIB, settings).starts
    assert not plan(preset("llama-3-8b"), GIB, structs.replace(settings, blocks_override=10)).starts


def test_longest_start():
    """10 GiB of Llama 3.1 8B hold 5,120 blocks, one of them unused: it starts up to 81,904 tokens."""
    assert longest_start(preset("llama-3.1-8b"), 10 * GIB, LONG) == 5_119 * 16
    assert longest_start(preset("llama-3.1-8b"), 0, LONG) == 0


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_model_len": 0}, "max_model_len must be 1 or more"),
        ({"parallel": Parallel(tp=0)}, "tp must be 1 or more"),
        ({"parallel": Parallel(tp=4, dcp=3)}, "dcp 3 must divide tp 4"),
    ],
)
def test_settings_out_of_range(changes, complaint):
    """Each is refused by name."""
    with pytest.raises(ConfigError, match=complaint):
        plan(preset("llama-3-8b"), GIB, structs.replace(LONG, **changes))


def test_what_vllm_refuses():
    """Windows cannot be split over context-parallel ranks; memory must be given for each stage."""
    with pytest.raises(ConfigError, match="sliding windows"):
        plan(preset("gpt-oss-20b"), GIB, structs.replace(LONG, parallel=Parallel(tp=2, dcp=2)))
    with pytest.raises(ConfigError, match="2 pipeline stages, but there are 1"):
        plan(preset("llama-3-8b"), [GIB, GIB], LONG)


def test_the_poorest_stage_decides():
    """All stages have as many blocks as the one with the least memory."""
    settings = structs.replace(LONG, parallel=Parallel(pp=2))
    poor = plan(preset("llama-3-8b"), [10 * GIB, 5 * GIB], settings)
    assert poor.blocks == plan(preset("llama-3-8b"), 5 * GIB, settings).blocks


@settings(deadline=None)
@given(st.sampled_from(PLANNED), st.integers(0, 200), st.integers(1, 100_000), st.sampled_from([1, 2, 4, 8]))
def test_a_plan_never_beats_the_ideal(name, gib, length, tp):
    """Blocks never exceed the memory, and whole conversations never exceed those of plain arithmetic."""
    model, settings = preset(name), Settings(max_model_len=length, parallel=Parallel(tp=tp))
    made = plan(model, gib * GIB, settings)
    assert made.blocks * made.bytes_per_block <= gib * GIB
    assert int(made.max_concurrency) * kv_bytes_per_gpu(model, length, settings.parallel) <= gib * GIB
    if tp == 1:
        assert int(made.max_concurrency) <= conversations(model, length, gib * GIB)


@settings(deadline=None)
@given(st.sampled_from(PLANNED), st.integers(1, 100_000))
def test_every_layer_is_in_one_group(name, length):
    """Groups partition the layers that keep something."""
    model = preset(name)
    made = plan(model, 100 * GIB, Settings(max_model_len=length))
    layers = sorted(layer for group in made.groups for layer in group.layers)
    assert layers == sorted(index for index, layer in enumerate(model.layers) for _ in layer)
