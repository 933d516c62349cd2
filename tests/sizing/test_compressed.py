"""DeepSeek V4's compressed attention, against figures worked out by hand from its published shape."""

import pytest

from kvroute.errors import ConfigError
from kvroute.sizing.assemble import report_of
from kvroute.sizing.capacity import Parallel, kv_bytes, kv_bytes_per_gpu, kv_bytes_per_token, state_bytes
from kvroute.sizing.compressed import index_bytes
from kvroute.sizing.hardware import gpu
from kvroute.sizing.model import model_of
from kvroute.sizing.planner import NoPlanError, Settings, plan
from kvroute.sizing.presets import PRESETS, preset
from kvroute.sizing.report import Wishes

FLASH = PRESETS["deepseek-v4-flash"].config
WORDS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}


@pytest.mark.parametrize(("name", "few", "many"), [("deepseek-v4-flash", 21, 20), ("deepseek-v4-pro", 30, 31)])
def test_bytes_of_a_token(name, few, many):
    """A vector of 512 numbers and an indexer's key of 132 bytes for 4 tokens, or a vector for 128."""
    model = preset(name)
    assert kv_bytes_per_token(model, 2) == few * (1024 + 132) // 4 + many * 1024 // 128
    assert kv_bytes_per_token(model) == kv_bytes_per_token(model, 1) == -(-(few * (584 + 132) * 32 + many * 584) // 128)


def test_a_conversation_keeps_windows_vectors_and_work():
    """At 100 tokens: windows that are not full, 25 vectors where 4 tokens share one, one where 128 do."""
    model = preset("deepseek-v4-flash")
    work = 21 * 8 * 2 * 2 * (512 + 128) * 4 + 20 * 128 * 2 * 512 * 4
    assert state_bytes(model) == work
    assert kv_bytes(model, 100, 2) == 43 * 100 * 1024 + 21 * 25 * (1024 + 132) + 20 * 1 * 1024 + work
    assert kv_bytes_per_gpu(model, 100, Parallel(tp=8), 2) == kv_bytes(model, 100, 2)


def test_a_million_tokens_take_a_tenth_of_its_predecessor():
    """The publisher states 10 % of DeepSeek V3.2's cache for Pro, and 7 % for Flash, at 1,048,576 tokens."""
    before = kv_bytes(preset("deepseek-v3.2"), 1 << 20, 1)
    assert kv_bytes(preset("deepseek-v4-pro"), 1 << 20, 1) / before == pytest.approx(0.10, abs=0.02)
    assert kv_bytes(preset("deepseek-v4-flash"), 1 << 20, 1) / before == pytest.approx(0.07, abs=0.015)


def test_both_spellings_describe_the_same_layers():
    """Ratios, as published, and the words that the transformers library writes."""
    words = {**FLASH, "layer_types": [WORDS[ratio] for ratio in FLASH["compress_ratios"]]}
    del words["compress_ratios"]
    assert model_of(words).layers == model_of(FLASH).layers
    rates = {"compress_rates": {"compressed_sparse_attention": 8}}
    assert {cache.stride for cache in model_of({**words, **rates}).caches} == {1, 8, 128}


def test_draft_layers_at_the_end_are_not_counted():
    """The published lists have an entry more, for the draft layer, which is said."""
    model = model_of({**FLASH, "compress_ratios": [*FLASH["compress_ratios"], 0]})
    assert model.layers == model_of(FLASH).layers
    assert any("44 entries for 43 layers" in note for note in model.notes)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"compress_ratios": [4] * 3}, "compress_ratios has 3 entries for 43 layers"),
        ({"compress_ratios": ["4"] * 43}, "compress_ratios has '4', where a ratio"),
        ({"compress_ratios": None}, "layer_types has 0 entries for 43 layers"),
        ({"compress_ratios": None, "layer_types": ["novel"] * 43}, "layer_types has 'novel', where a ratio"),
        ({"sliding_window": None}, "sliding_window is missing"),
        ({"index_topk": None}, "index_topk is missing"),
        ({"qk_rope_head_dim": 513}, "qk_rope_head_dim is 513, more than head_dim 512"),
    ],
)
def test_what_is_missing_is_named(change, complaint):
    """One line that names the field."""
    with pytest.raises(ConfigError, match=complaint):
        model_of({**FLASH, **change})


def test_another_release_s_ratios_are_not_taken_for_these():
    """A family that only shares the field's name is counted as far as it is understood, with a note."""
    model = model_of({**FLASH, "model_type": "deepseek_v41"})
    assert any("compress_ratios" in note for note in model.notes)


def test_what_fits_is_said_without_a_plan():
    """vLLM's packed pages are not planned here: the ideal figures stand, with a warning instead of a plan."""
    with pytest.raises(NoPlanError, match="mixed sizes"):
        plan(preset("deepseek-v4-flash"), 10**11, Settings(max_model_len=1_000))
    machine = report_of(preset("deepseek-v4-flash"), [gpu("h200")], Wishes(parallel=Parallel(tp=4))).machines[0]
    assert machine.vllm is None
    assert machine.capacity_tokens > 10**6
    assert any("no plan" in warning for warning in machine.warnings)


def test_an_indexers_key():
    """8-bit numbers, and a 4-byte scale for each 128 of them or part of that."""
    assert [index_bytes(dim) for dim in (64, 128, 129)] == [68, 132, 137]
