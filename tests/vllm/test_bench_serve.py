"""vLLM's own load generator against a simulated replica: it runs, and counts what the replica counts."""

from __future__ import annotations

import json
import subprocess
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.processes import SimulatedReplica
from tests.vllm.engines import environment, venv

PROMPTS = 40
RANDOM = ["--dataset-name", "random", "--random-input-len", "200", "--random-output-len", "30", "--ignore-eos"]
PREFIXES = [
    *("--dataset-name", "prefix_repetition", "--prefix-repetition-prefix-len", "256"),
    *("--prefix-repetition-suffix-len", "64", "--prefix-repetition-num-prefixes", "4"),
    *("--prefix-repetition-output-len", "20"),
]


def bench(url: str, model: Path, folder: Path, *arguments: str) -> dict[str, Any]:
    """Run `vllm bench serve` without its trial request, and return what it measured."""
    command = [
        *(str(venv() / "bin" / "vllm"), "bench", "serve", "--base-url", url, "--model", "sim"),
        *("--tokenizer", str(model), "--num-prompts", str(PROMPTS), "--ready-check-timeout-sec", "0"),
        *("--save-result", "--result-dir", str(folder), "--result-filename", "result.json", *arguments),
    ]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    result: dict[str, Any] = json.loads((folder / "result.json").read_text())
    return result


def counted(url: str) -> dict[str, float]:
    """Sum a replica's counters over their labels."""
    with urllib.request.urlopen(url + "/metrics", timeout=10) as answer:
        text = answer.read().decode()
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            sums[sample.name] = sums.get(sample.name, 0.0) + sample.value
    return sums


@pytest.mark.parametrize(
    ("backend", "dataset"),
    [
        (["--backend", "openai", "--endpoint", "/v1/completions"], RANDOM),
        (["--backend", "openai-chat", "--endpoint", "/v1/chat/completions"], RANDOM),
        (["--backend", "openai", "--endpoint", "/v1/completions", "--max-concurrency", "4"], PREFIXES),
    ],
)
def test_its_totals_are_the_replicas_own(
    tmp_path: Path, model_dir: Path, backend: list[str], dataset: list[str]
) -> None:
    """Requests, prompt tokens and generated tokens are equal, on both endpoints; no request fails."""
    with SimulatedReplica("--speed", "20", "--kv-tokens", "200000", log=tmp_path / "replica.log") as replica:
        result = bench(replica.url, model_dir, tmp_path, *backend, *dataset)
        own = counted(replica.url)
    assert (result["completed"], result["failed"]) == (PROMPTS, 0)
    assert own["vllm:request_success_total"] == PROMPTS
    assert own["vllm:prompt_tokens_total"] == result["total_input_tokens"]
    assert own["vllm:generation_tokens_total"] == result["total_output_tokens"] > 0
    assert own["vllm:num_requests_running"] == own["vllm:num_requests_waiting"] == 0
    if dataset is PREFIXES:  # 36 of 40 prompts find a prefix that is 256 of their 320 tokens: 0.72, less broken blocks
        assert own["vllm:prefix_cache_hits_total"] > 0.5 * own["vllm:prompt_tokens_total"]
