"""Start-up logs of every wording since 0.9."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.sizing.engine_log import GIB, EngineLog, read_log

CPU_LOG = Path(__file__).parents[1] / "data" / "startup" / "vllm-0.32-cpu.log"
INIT = "(EngineCore pid=7) INFO 01-02 03:04:05 [core.py:1] Initializing a V1 LLM engine (v{version}) with config: "
CONFIG = "model='/models/llama', dtype=torch.bfloat16, max_seq_len=16384, tensor_parallel_size={tp}, "
SIZE = "INFO 01-02 03:04:06 [kv_cache_utils.py:1] {device} KV cache size: {tokens:,} tokens"
CONCURRENCY = "Maximum concurrency for 16,384 tokens per request: 24.19x"
MEMORY = "INFO 01-02 03:04:06 [gpu_worker.py:2] Available KV cache memory: {gib:.2f} GiB"


def log_text(version="0.12.0", tokens=396_272, gib=48.37, tp=1, joined=False, device="GPU", more=""):
    """Write the lines that a release prints."""
    size = SIZE.format(device=device, tokens=tokens)
    capacity = (
        f"{size}, {CONCURRENCY}" if joined else f"{size}\nINFO 01-02 03:04:06 [kv_cache_utils.py:2] {CONCURRENCY}"
    )
    return "\n".join([INIT.format(version=version) + CONFIG.format(tp=tp), MEMORY.format(gib=gib), capacity, more])


@pytest.mark.parametrize(
    ("version", "joined", "device"),
    [("0.9.2", False, "GPU"), ("0.27.1", False, "GPU"), ("0.28.0", True, "GPU"), ("0.32.0", True, "XPU")],
)
def test_both_wordings(version, joined, device):
    """Two lines until 0.27, one from 0.28, and the device's name from 0.32."""
    log = read_log(log_text(version, joined=joined, device=device))
    assert (log.version, log.device) == (version, device)
    assert (log.tokens, log.max_model_len, log.max_concurrency) == (396_272, 16_384, 24.19)
    assert log.available_bytes == round(48.37 * GIB)
    assert log.served == "/models/llama"


def test_a_recorded_log():
    """The log of a real CPU engine, with its memory given exactly by a flag."""
    log = read_log(CPU_LOG.read_text())
    assert (log.version, log.release, log.device) == ("0.32.0", (0, 32), "CPU")
    assert (log.tokens, log.max_model_len, log.max_concurrency) == (262_144, 8_192, 32.0)
    assert (log.available_bytes, log.available_exact, log.block_size) == (64 << 20, True, 32)
    assert (log.tp, log.pp, log.dp, log.dcp) == (1, 1, 1, 1)


def test_the_poorest_worker_counts():
    """Workers print a line each; the least memory and the fewest tokens are taken."""
    text = log_text(tp=2) + "\n" + MEMORY.format(gib=40.0) + "\n" + SIZE.format(device="GPU", tokens=327_680)
    log = read_log(text)
    assert (log.available_bytes, log.tokens, log.tp) == (40 * GIB, 327_680, 2)


@pytest.mark.parametrize(
    ("line", "field", "value"),
    [
        ("non-default args: {'gpu_memory_utilization': 0.5, 'block_size': 64}", "utilisation", 0.5),
        ("non-default args: {'gpu_memory_utilization': 0.5, 'block_size': 64}", "block_size", 64),
        ("Model loading took 14.99 GiB memory and 3.5 seconds", "weights_bytes", round(14.99 * GIB)),
        ("Model loading took 14.9889 GiB and 3.512 seconds", "weights_bytes", round(14.9889 * GIB)),
        ("Graph capturing finished in 21 secs, took 0.57 GiB", "graphs_bytes", round(0.57 * GIB)),
        ("Overriding num_gpu_blocks=512 with num_gpu_blocks_override=512", "blocks_override", 512),
        ("Chunked prefill is enabled with max_num_batched_tokens=2048.", "batched_tokens", 2048),
        ("kv_cache_dtype=fp8_e4m3, device_config=cuda", "cache_dtype", "fp8_e4m3"),
        ("Setting attention block size to 544 tokens to ensure", "block_size", 544),
        ("Asynchronous scheduling is disabled.", "asynchronous", False),
        ("enable_prefix_caching=False, ", "prefix_caching", False),
        ("Hybrid KV cache manager is disabled for this hybrid model", "hybrid", False),
        ("decode_context_parallel_size=4, pipeline_parallel_size=2", "dcp", 4),
    ],
)
def test_other_lines(line, field, value):
    """Settings and memory are found wherever they are printed."""
    assert getattr(read_log(line), field) == value


@settings(deadline=None)
@given(st.text(), st.text(max_size=20), st.integers(0, 10**12))
def test_any_text_is_read(before, between, tokens):
    """Whatever surrounds the lines, reading does not fail."""
    assert isinstance(read_log(before), EngineLog)
    text = f"{before}\n{SIZE.format(device='GPU', tokens=tokens)}\n{between}"
    assert read_log(text).tokens is not None


@pytest.mark.parametrize("figure", [",", ".", "1.2.3.", "9" * 5_000, "-"])
def test_a_figure_that_is_none_counts_as_not_printed(figure):
    """A log that was cut, or edited by hand, is read for what is left of it."""
    text = f"Available KV cache memory: {figure} GiB\nGPU KV cache size: {figure} tokens\n"
    found = read_log(f"{text}tensor_parallel_size=2")
    assert (found.tokens, found.available_bytes, found.tp) == (None, None, 2)
    assert read_log("'kv_cache_memory_bytes': " + "9" * 5_000).available_bytes is None
