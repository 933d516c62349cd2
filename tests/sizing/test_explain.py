"""Why a plan is not the ideal."""

from kvroute.sizing.explain import explain
from kvroute.sizing.planner import Settings, plan
from kvroute.sizing.presets import preset

GIB = 2**30


def reasons(name, **changes):
    """Explain ten GiB of a model."""
    settings = Settings(**{"max_model_len": 131_072, **changes})
    return "\n".join(explain(preset(name), plan(preset(name), 10 * GIB, settings), settings, 10 * GIB))


def test_full_attention_loses_only_the_unused_block():
    """Without windows, ideal and plan agree, and block 0 is named."""
    text = reasons("llama-3.1-8b")
    assert "ideal: 0.62 conversations of 131,072 tokens; as vLLM plans them: 0.62" in text
    assert "block 0 is never used: 2.1 MB" in text
    assert "window" not in text


def test_windows_hold_batches_in_flight():
    """The window's blocks are named with what is kept beside it."""
    assert "a window of 128 tokens takes 1,033 blocks instead of 8: up to 16,384 tokens" in reasons("gpt-oss-20b")


def test_groups_that_do_not_fill_a_block():
    """Gemma 3's 52 window layers make groups of 8 and 9 beside the 10 full ones."""
    assert "a group of 8 window layers fills 80% of a block" in reasons("gemma-3-27b")


def test_states_enlarge_blocks():
    """Hybrids have larger blocks, and a state takes some of every conversation."""
    text = reasons("qwen3-next-80b")
    assert "blocks hold 544 tokens instead of 16" in text
    assert "a recurrent state takes 2 blocks" in text


def test_an_override_explains_itself():
    """With a fixed number of blocks nothing else matters."""
    assert "the number of blocks is overridden: 77" in reasons("llama-3.1-8b", blocks_override=77)
