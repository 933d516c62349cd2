"""`kvroute size` as a user runs it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from kvroute.cli_size import size

DATA = Path(__file__).parent / "data" / "startup"
LOG = DATA / "vllm-0.32-cpu.log"
HEAVY = ("rich", "yaml", "aiohttp", "redis", "tokenizers", "fastokens", "prometheus_client", "numpy", "kvroute.proxy")


def run(*words):
    """Run the command in this process."""
    return CliRunner().invoke(size, [str(word) for word in words])


def test_json_has_plain_figures():
    """Scripts read kv_bytes_per_token as an integer."""
    found = json.loads(run("llama-3.1-8b", "--json").stdout)
    assert found["kv_bytes_per_token"] == 131_072
    assert [one["gpu"] for one in found["machines"]] == ["h100", "h200"]


def test_an_fp8_cache_halves_a_token():
    """The cache's dtype is a flag of its own."""
    assert json.loads(run("llama-3.1-8b", "--json", "--kv-cache-dtype", "fp8").stdout)["kv_bytes_per_token"] == 65_536


def test_tables():
    """The default output is made for people."""
    done = run("gpt-oss-20b", "--gpu", "l40s", "--context", "4000,16_000", "--batch", "1,4")
    assert done.exit_code == 0
    assert "24,576 (24 KiB)" in done.stdout
    assert "16,000" in done.stdout


def test_a_file_and_a_folder(tmp_path):
    """MODEL may be a config.json or its folder."""
    (tmp_path / "config.json").write_text((DATA / "vllm-0.32-cpu.json").read_text())
    for name in (tmp_path, tmp_path / "config.json"):
        assert json.loads(run(name, "--json").stdout)["kv_bytes_per_token"] == 256


def test_a_page_is_written(tmp_path):
    """--html writes one file."""
    page = tmp_path / "size.html"
    assert run("llama-3.1-8b", "--html", page).exit_code == 0
    assert page.read_text().startswith("<!doctype html>")


def test_the_recorded_log_agrees():
    """A real engine's log and its model's shape give the same count."""
    done = run(DATA / "vllm-0.32-cpu.json", "--log", LOG)
    assert done.exit_code == 0
    assert "agrees" in done.stdout
    found = json.loads(run(DATA / "vllm-0.32-cpu.json", "--log", LOG, "--json").stdout)
    assert (found["verdict"]["agrees"], found["verdict"]["expected_tokens"]) == (True, [262_144, 262_144])


def test_a_log_of_another_model_does_not():
    """The exit code tells scripts."""
    done = run("llama-3.1-8b", "--log", LOG, "--gpu", "h100")
    assert done.exit_code == 1
    assert "does not agree" in done.stdout


def test_custom_hardware(tmp_path):
    """By flags or by file."""
    found = json.loads(run("llama-3.1-8b", "--json", "--gpu-memory", 24, "--gpu-bandwidth", 1000).stdout)
    assert [(one["gpu"], len(one["decode"]) > 0) for one in found["machines"]] == [("custom", True)]
    (tmp_path / "gpu.yaml").write_text("{name: mine, memory_gb: 48}")
    found = json.loads(run("llama-3.1-8b", "--json", "--hardware", tmp_path / "gpu.yaml").stdout)
    assert [one["gpu"] for one in found["machines"]] == ["mine"]


def test_mix_and_parallelism():
    """Shares may be percentages; every parallelism has its flag."""
    flags = ("--mix", "95%:8000,0.05:64000", "--tp", 2, "--pp", 2, "--dp", 2, "--dcp", 2, "--weights", 16)
    found = json.loads(run("llama-3.1-8b", "--json", *flags).stdout)
    assert found["machines"][0]["gpus"] == 8
    assert found["machines"][0]["mix_conversations"] > 0


def test_presets_and_gpus_are_listed():
    """--list names what can be given."""
    done = run("--list")
    assert "llama-3.1-8b" in done.stdout
    assert "h100" in done.stdout


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "MODEL is missing"),
        (["nothing-like-it"], "no preset is named"),
        (["./absent"], "no such file"),
        (["llama-3.1-8b", "--gpu", "h1000"], "or describe one with --gpu-memory"),
        (["llama-3.1-8b", "--context", "many"], "--context: 'many' is not a whole number"),
        (["llama-3.1-8b", "--context", ","], "--context: from 1 to"),
        (["llama-3.1-8b", "--batch", "0"], "--batch: 0 is out of range"),
        (["llama-3.1-8b", "--weights", "-1"], "--weights: -1.0 must be from 0"),
        (["llama-3.1-8b", "--working", "nan"], "--working: nan must be from 0"),
        (["llama-3.1-8b", "--gpu-memory", "-80"], "memory_gb must be a number above 0"),
        (["llama-3.1-8b", "--utilisation", "9"], "--utilisation: 9.0 must be"),
        (["llama-3.1-8b", "--tp", "0"], "--tp, --pp, --dp"),
        (["llama-3.1-8b", "--tp", "-1", "--pp", "-1"], "--tp, --pp, --dp"),
        (["llama-3.1-8b", "--pp", "33"], "--pp: 33 stages are more than the model's 32 layers"),
        (["llama-3.1-8b", "--dcp", "3", "--tp", "2"], "dcp 3 must divide tp 2"),
        (["llama-3.1-405b", "--dcp", "0", "--gpu", "t4"], "dcp must be 1 or more, not 0"),
        (["llama-3.1-8b", "--gpu-tflops", "989"], "give its --gpu-memory too"),
        ([""], "MODEL is missing"),
        (["--metrics", "file:///etc"], "must begin with http"),
        (["llama-3.1-8b", "--mix", "half:8000"], "--mix: 'half:8000' must be SHARE:TOKENS"),
        (["llama-3.1-8b", "--kv-cache-dtype", "int3"], "'int3' is not known"),
        (["llama-3.1-8b", "--log", "absent.log"], "No such file"),
        (["llama-3.1-8b", "--html", "/absent/x.html"], "No such file"),
        (["--metrics", "http://127.0.0.1:9"], "refused"),
    ],
)
def test_bad_input_gives_one_line(words, complaint):
    """What is wrong and what would be right, without a traceback."""
    done = run(*words)
    assert done.exit_code == 1
    assert complaint in done.stderr
    assert done.stderr.count("\n") == 1


WORDS = ["llama-3.1-8b", "--json", "--tp", "--mix", "-1", "1e9", "9:9", "é", "--context", "--gpu", "l4"]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(WORDS), max_size=6))
def test_any_words_end_in_an_answer_or_one_error(words):
    """Whatever is typed, the command ends with 0, 1 or click's own 2, never with a traceback."""
    assert run(*words).exit_code in (0, 1, 2)


def test_nothing_heavy_is_imported_on_the_way():
    """A JSON answer is made without rich, YAML, HTTP or anything of the router."""
    program = (
        "import sys; from kvroute.cli_size import size;"
        "size(['llama-3.1-8b', '--json'], standalone_mode=False);"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
