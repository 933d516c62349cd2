"""Whether a log's count is what its configuration gives."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from kvroute.errors import ConfigError
from kvroute.sizing.capacity import Parallel
from kvroute.sizing.engine_log import GIB, ROUNDING_BYTES, EngineLog, read_log
from kvroute.sizing.hardware import gpu
from kvroute.sizing.model import model_from_json, model_of
from kvroute.sizing.planner import Settings, plan
from kvroute.sizing.presets import preset
from kvroute.sizing.verdict import judge
from tests.sizing.test_engine_log import CPU_LOG

SIZE = 48 * GIB


def log_of(name, version="0.33.0", parallel=Parallel(), **changes):  # noqa: B008  the value is frozen
    """What an engine with 48 GiB a GPU prints."""
    given = {"max_model_len": 16_384, "parallel": parallel, **changes}
    made = plan(preset(name), SIZE, Settings(**given))
    return EngineLog(
        version=version,
        tokens=made.tokens,
        max_model_len=16_384,
        max_concurrency=made.max_concurrency,
        available_bytes=SIZE + ROUNDING_BYTES // 2,
        tp=parallel.tp,
        dcp=parallel.dcp,
    )


def findings(log, name, hardware=None):
    """Judge and join what was found."""
    return "\n".join(judge(log, preset(name), hardware).findings)


def test_the_recorded_log_agrees():
    """A real CPU engine's log agrees with its model, exactly."""
    config = CPU_LOG.with_suffix(".json")
    verdict = judge(read_log(CPU_LOG.read_text()), model_from_json(config.read_bytes(), config.name))
    assert verdict.agrees is True
    assert verdict.expected_tokens == (262_144, 262_144)


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-20b", "gemma-3-27b", "qwen3-next-80b"])
def test_a_count_within_the_logs_rounding_agrees(name):
    """Memory is printed in hundredths of a GiB: counts within that agree."""
    verdict = judge(log_of(name), preset(name))
    assert verdict.agrees is True
    least, most = verdict.expected_tokens
    assert least <= verdict.reported_tokens <= most


def test_older_releases_are_judged_by_their_own_count():
    """Until 0.22 a hybrid's tokens were counted another way."""
    made = plan(preset("gpt-oss-20b"), SIZE, Settings(max_model_len=16_384))
    log = structs.replace(log_of("gpt-oss-20b", "0.12.0"), tokens=made.tokens_before_0_22)
    assert judge(log, preset("gpt-oss-20b")).agrees is True


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"element_bytes": 1}, "a cache of 8-bit numbers"),
        ({"hybrid": False}, "window layers kept whole"),
        ({"batched_tokens": 2_048}, "2,048 batched tokens"),
    ],
)
def test_the_setting_that_explains_a_difference_is_named(changes, words):
    """A count that one other setting would give points at it."""
    log = log_of("gpt-oss-20b", **changes)
    verdict = judge(log, preset("gpt-oss-20b"))
    assert verdict.agrees is False
    assert words in verdict.findings[0]


def test_another_model_is_suspected():
    """A count that no setting explains is given as bytes a token."""
    verdict = judge(log_of("llama-3.1-70b"), preset("llama-3.1-8b"))
    assert verdict.agrees is False
    assert "the engine spends 327,7" in verdict.findings[0]
    assert "another model" in verdict.findings[0]


def test_heads_repeated_over_gpus():
    """More tensor-parallel GPUs than KV heads is named, with the remedy."""
    log = log_of("qwen2.5-7b", parallel=Parallel(tp=8))
    assert "each head is kept 2 times; --decode-context-parallel-size 2" in findings(log, "qwen2.5-7b")
    assert "kept whole on each of 8 GPUs" in findings(log_of("deepseek-v3", parallel=Parallel(tp=8)), "deepseek-v3")


def test_where_the_memory_went():
    """A low share, heavy weights and other uses of the GPU are named with their sizes."""
    log = structs.replace(
        log_of("llama-3.1-8b"), utilisation=0.5, weights_bytes=30 * 10**9, available_bytes=5 * GIB, tokens=40_960
    )
    text = findings(log, "llama-3.1-8b", gpu("h100"))
    assert "--gpu-memory-utilization is 0.5: at 0.92 the cache has 33.6 GB more" in text
    assert "the weights take 30.0 GB a GPU instead of 16.1" in text
    usual = structs.replace(log, utilisation=0.9, weights_bytes=None)
    assert "another process on the GPU" in findings(usual, "llama-3.1-8b", gpu("h100"))


def test_an_override_is_named():
    """A fixed number of blocks decides, whatever memory there is."""
    log = structs.replace(log_of("llama-3.1-8b", blocks_override=100), blocks_override=100)
    verdict = judge(log, preset("llama-3.1-8b"))
    assert verdict.agrees is True
    assert "--num-gpu-blocks-override 100" in "".join(verdict.findings)


def test_a_log_that_ends_early():
    """Without a count, the log says how far the engine would start, or that nothing is left, or too little to tell."""
    ended = structs.replace(log_of("llama-3.1-8b"), tokens=None, available_bytes=GIB)
    assert "it starts up to --max-model-len 8,176" in findings(ended, "llama-3.1-8b")
    assert "nothing is left" in findings(structs.replace(ended, available_bytes=-GIB), "llama-3.1-8b")
    assert "no line with the size" in findings(EngineLog(), "llama-3.1-8b")
    blind = judge(structs.replace(log_of("llama-3.1-8b"), available_bytes=None), preset("llama-3.1-8b"))
    assert (blind.agrees, blind.reported_tokens) == (None, log_of("llama-3.1-8b").tokens)


def test_a_context_is_needed():
    """Where neither log nor model has it, it is asked for."""
    model = model_of({"num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 8, "torch_dtype": "bfloat16"})
    with pytest.raises(ConfigError, match="--max-model-len"):
        judge(EngineLog(tokens=5, available_bytes=5), model)


@pytest.mark.parametrize("parallel", [{"tp": 0}, {"pp": 33}, {"pp": 10**12}, {"dcp": 3}])
def test_parallelism_that_cannot_be_is_refused(parallel):
    """A log that says so is of another model, or was edited: one line names it."""
    log = EngineLog(tokens=1_000, available_bytes=10**9, max_model_len=1_000, **parallel)
    with pytest.raises(ConfigError):
        judge(log, preset("llama-3-8b"), gpu("h100"))


def test_no_tokens_reported():
    """Zero tokens are a finding, not a division by zero."""
    log = EngineLog(tokens=0, available_bytes=10 * 2**30, max_model_len=1_000)
    verdict = judge(log, preset("llama-3-8b"))
    assert (verdict.agrees, verdict.findings[0]) == (False, "the engine reported a cache of no tokens at all")


WORDS = ["0", "-1", ",", ".", "1.2.3", "nan", "9" * 30, "7", "16", "auto", "fp8", "\n"]
LINES = (
    "GPU KV cache size: {} tokens",
    "Available KV cache memory: {} GiB",
    "Maximum concurrency for {} tokens per request: {}x",
    "Model loading took {} GiB",
    *(f"{name}={{}}" for name in ("tensor_parallel_size", "pipeline_parallel_size", "kv_cache_dtype")),
    *(f"{name}={{}}" for name in ("max_num_batched_tokens", "num_gpu_blocks_override")),
    "'block_size': {}",
)


@settings(deadline=None)
@given(
    st.sampled_from(["llama-3-8b", "gemma-3-27b", "deepseek-v3", "deepseek-v4-flash", "qwen3-next-80b"]),
    st.lists(st.tuples(st.sampled_from(LINES), st.sampled_from(WORDS)), max_size=8),
)
def test_any_log_gives_a_verdict_or_one_line(name, lines):
    """Whatever figures a log holds, the answer is a verdict or one clear complaint."""
    text = "\n".join(line.replace("{}", word) for line, word in lines)
    complaint = ""
    try:
        judge(read_log(text), preset(name), gpu("h100"))
    except ConfigError as error:
        complaint = str(error)
    assert "\n" not in complaint
    assert len(complaint) < 400
