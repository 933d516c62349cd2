"""`kvroute simulate`."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys

import pytest
from click.testing import CliRunner

from kvroute.cli import main
from tests.data_files import DATA

SMALL = ["chat:sessions=8,rate=4,think=1", "--limit", "30"]


def simulate(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


def figures(*arguments):
    done = simulate(*arguments, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def trace(tmp_path, rows, name="trace.jsonl.gz"):
    path = tmp_path / name
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def test_policies_are_compared_in_a_table():
    """Every policy has a column, every figure a line, and what is ignored is said."""
    done = simulate(*SMALL, "--policy", "kvroute,random")
    assert done.exit_code == 0, done.output
    assert "kvroute" in done.stdout
    assert "random" in done.stdout
    assert "first token, p99" in done.stdout
    assert "Not in this result" in done.stdout


@pytest.mark.slow
def test_the_same_command_prints_the_same():
    """A seed decides everything: two processes agree to the last digit."""
    command = [
        sys.executable,
        "-m",
        "kvroute",
        "simulate",
        *SMALL,
        "--policy",
        "random,kvroute",
        "--seeds",
        "2",
        "--json",
    ]
    outputs = [subprocess.run(command, check=True, capture_output=True, timeout=120).stdout for _ in range(2)]
    assert outputs[0] == outputs[1]
    runs = json.loads(outputs[0])["policies"]["random"]["runs"]
    assert [run["seed"] for run in runs] == [1, 2]
    assert runs[0]["ttft_mean_s"] != runs[1]["ttft_mean_s"]


def test_a_trace_is_played_with_its_block_size_inferred(tmp_path):
    """A packed trace in Mooncake's layout is played; its repeated prompt is hit."""
    row = {"input_length": 2048, "output_length": 8, "hash_ids": [1, 2, 3, 4]}
    path = trace(tmp_path, [{"timestamp": 1000 * n, **row} for n in range(6)])
    found = figures(path, "--replicas", 1, "--policy", "kvroute")
    assert found["settings"]["trace"] == "6 requests, blocks of 512"
    assert found["policies"]["kvroute"]["summary"]["hit_share"]["mean"] == pytest.approx(5 * 2032 / (6 * 2048))


def test_recorded_texts_are_played():
    """Conversations without token ids are played as text."""
    found = figures(DATA / "tau_airline_text_a.jsonl.gz", "--sessions", 4, "--policy", "kvroute", "--starts", 1)
    summary = found["policies"]["kvroute"]["summary"]
    assert summary["requests"]["mean"] > 20
    assert summary["hit_share"]["mean"] > 0.5
    assert any("four bytes a token" in note for note in found["ignored"])


@pytest.mark.slow
def test_reports_are_written(tmp_path):
    """A page and a picture are written where asked for."""
    done = simulate(*SMALL, "--html", tmp_path / "r.html", "--png", tmp_path / "r.png")
    assert done.exit_code == 0, done.output
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (tmp_path / "r.png").read_bytes().startswith(b"\x89PNG")


def test_a_cache_is_what_fits_on_the_hardware():
    """Without --kv-tokens the cache follows from the model and its GPUs."""
    one, two = (figures(*SMALL, "--hardware", name)["settings"]["cache"] for name in ("h100", "2xh100"))
    assert one != two


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere.jsonl"], "no file nowhere.jsonl"),
        ([*SMALL, "--policy", "magic"], "--policy: 'magic'"),
        ([*SMALL, "--hardware", "abacus"], "no GPU is named"),
        ([*SMALL, "--hardware", "0xh100"], "--hardware"),
        ([*SMALL, "--hardware", "3xh100"], "3 GPUs do not divide the 32 query heads of llama-3.1-8b"),
        ([*SMALL, "--policy", "blend:1:2"], "blend:3:2:2"),
        ([*SMALL, "--model", "llama-3.1-405b"], "name more GPUs"),
        ([*SMALL, "--think", "soon"], "--think"),
        ([*SMALL, "--event", "now:crash:1"], "--event"),
        (["chat:colour=red"], "no parameter is named 'colour'"),
        (["chat:users=0"], "users"),
        (["chat:rate=1e-300"], "rate"),
        ([*SMALL, "--html", "/nowhere/r.html"], "/nowhere/r.html"),
        ([*SMALL, "--png", "/"], "/: Is a directory"),
        ([*SMALL, "--kv-tokens", "99999999999999"], "a larger --block-size"),
        ([*SMALL, "--event", "5:crash:4"], "there is no replica 4 then"),
        ([*SMALL, "--event", "5:join:3"], "replica 3 is there already; the first to join is 4"),
        ([*SMALL, "--event", "5:join:999999999"], "numbers of replicas are below"),
        ([*SMALL, "--jitter", "2"], "--jitter is for traces in files"),
        ([*SMALL, "--max-prompt", "9"], "--max-prompt is for traces in files"),
        ([*SMALL, "--warmup", "99999"], "no request was counted"),
        ([DATA / "tau_airline_text_a.jsonl.gz", "--trace-block", "7"], "--trace-block is for"),
        ([DATA / "mooncake_conversation_a.jsonl.gz", "--loop", "open", "--think", "5"], "--think closes the loop"),
        ([DATA / "mooncake_conversation_a.jsonl.gz", "--loop", "alone", "--starts", "5"], "--starts closes the loop"),
    ],
)
def test_mistakes_are_named(arguments, words):
    """A wrong option ends in one line that says which, and no traceback."""
    done = simulate(*arguments)
    assert done.exit_code == 1
    assert words in done.output
    assert "Traceback" not in done.output


@pytest.mark.parametrize("text", ["nan", "inf", "0", "-1", "1e-300"])
@pytest.mark.parametrize("option", ["--rate", "--starts"])
def test_a_rate_is_a_number_that_can_be_played(option, text):
    """None, and none so small or large that times are no numbers."""
    done = simulate(*SMALL, f"{option}={text}")
    assert done.exit_code == 2
    assert option in done.output


def test_the_result_names_every_option_that_was_given():
    """Whoever reads a report later sees what was asked for, however seldom the option."""
    given = {"event_lag": 2.0, "metrics_every": 0.5, "max_num_seqs": 7, "tells_output": True, "ledger_loss": 0.25}
    flags = ["--event-lag=2", "--metrics-every=0.5", "--max-num-seqs=7", "--tells-output", "--ledger-loss=0.25"]
    settings = figures(*SMALL, "--policy", "random", *flags)["settings"]
    assert {name: settings.get(name) for name in given} == {name: str(value) for name, value in given.items()}
    assert set(settings) - set(given) == {"workload", "replicas", "cache", "context", "knowledge", "limit", "seeds"}


@pytest.mark.parametrize("trace", ["agent:sessions=5,rate=1,turns=6", DATA / "tau_airline_text_a.jsonl.gz"])
def test_where_nothing_is_evicted_there_are_no_refaults(trace):
    """A cache that is never full loses nothing: a block that its answer's last token fills was never there."""
    summary = figures(trace, "--limit", 60, "--policy", "random")["policies"]["random"]["summary"]
    assert summary["hit_share"]["mean"] > 0
    assert summary["refault_tokens"]["mean"] == 0


@pytest.mark.parametrize(
    ("flags", "words"), [(["--max-model-len", "100"], "100"), (["--event", "1:crash:0", "--replicas", 1], "crashed")]
)
def test_a_result_with_failed_requests_says_why(flags, words):
    """Whoever sees that requests failed is told how the first of them did."""
    found = figures(*SMALL, "--policy", "random", *flags)
    assert found["policies"]["random"]["summary"]["failed"]["mean"] > 0
    assert words in found["settings"]["first failure, random"]


@pytest.mark.parametrize(
    "line",
    ['{"input_length": -3, "timestamp": 5}', '{"length": 3}', "no JSON", '{"input_length": 9, "hash_runs": [[0,0]]}'],
)
@pytest.mark.parametrize("before", [0, 300])
def test_a_line_at_fault_is_shown_with_its_file(tmp_path, line, before):
    """Wherever it is: at the head, where the trace is looked at, or further on, where it is played."""
    trace = tmp_path / "trace.jsonl"
    good = '{"input_length": 9, "output_length": 1, "timestamp": 1}\n'
    trace.write_text(good * before + line + "\n")
    done = simulate(trace, "--policy", "random")
    assert done.exit_code == 1
    assert done.output.startswith(f"Error: {trace}: ")
    assert line in done.output


def test_a_conversation_longer_than_the_model_reads_is_refused_as_by_vllm():
    """The context is the model's where the cache holds more, and another where one is given."""
    found = figures("shared-prefix:system=40000", "--limit", 3, "--model", "qwen3-32b", "--hardware", "2xh100")
    assert found["settings"]["context"] == "40,960 tokens"
    assert "40960" in found["settings"]["first failure, kvroute"]
    longer = ("--max-model-len", 60_000)
    found = figures("shared-prefix:system=40000", "--limit", 3, "--model", "qwen3-32b", "--hardware", "2xh100", *longer)
    assert found["settings"]["context"] == "60,000 tokens"
    assert found["policies"]["kvroute"]["summary"]["failed"]["mean"] == 0


def test_cpu_memory_may_be_put_behind_the_caches():
    """It is named in the result, and more is hit."""
    flags = (*SMALL[:1], "--limit", 60, "--policy", "random", "--replicas", 2, "--kv-tokens", 4000)
    plain, more = figures(*flags), figures(*flags, "--kv-offloading-size", 1)
    assert more["settings"]["CPU memory"] == "8,192 tokens each"
    hits = [one["policies"]["random"]["summary"]["hit_share"]["mean"] for one in (plain, more)]
    assert hits[1] > hits[0]


def test_clients_may_be_bounded():
    """With one conversation at a time nobody waits for another."""
    flags = ("--policy", "random", "--replicas", 1)
    free, bound = (figures(*SMALL, *flags, *more) for more in ((), ("--max-concurrency", 1)))
    means = [one["policies"]["random"]["summary"]["end_to_end_mean_s"]["mean"] for one in (free, bound)]
    assert means[1] < means[0]
    assert bound["settings"]["max_concurrency"] == "1"


def test_an_empty_file_is_refused(tmp_path):
    """There is nothing to play in it."""
    assert "nothing in it" in simulate(trace(tmp_path, [])).output


def test_measured_step_times_replace_the_computed_ones(tmp_path):
    """With a table that says 40 ms for every step, a token takes 40 ms; a wrong table is told by its row."""
    table = tmp_path / "times.csv"
    table.write_text("kind,count,context,seconds\ndecode,1,0,0.04\nprefill,1,0,0.04\n")
    summary = figures(*SMALL, "--policy", "random", "--step-times", table)["policies"]["random"]["summary"]
    assert summary["token_time_mean_s"]["mean"] == pytest.approx(0.04)
    table.write_text("kind,count,context,seconds\nsleep,1,0,0.04\n")
    done = simulate(*SMALL, "--step-times", table)
    assert (done.exit_code, "row 1: kind" in done.output) == (1, True)


def test_phases_are_counted_apart():
    """A conversation counts where it began, and every request counts once."""
    found = figures(*SMALL, "--policy", "kvroute", "--phases", "1,2")["policies"]["kvroute"]
    assert [phase["begin_s"] for phase in found["phases"]] == [0, 1, 2]
    assert sum(phase["completed"] for phase in found["phases"]) == found["summary"]["requests"]["mean"]


def test_tenants_are_counted_apart_and_one_can_be_played_alone():
    """Every request is somebody's; alone, a tenant has the same conversations as among the others."""
    work = ["chat:sessions=30,rate=4,think=1", "--tenants", "3,1", "--policy", "random"]
    found = figures(*work)["policies"]["random"]
    assert found["tenants"].keys() == {"1", "2"}
    counts = {name: tenant["completed"] for name, tenant in found["tenants"].items()}
    assert counts["1"] > counts["2"] > 0
    assert sum(counts.values()) == found["summary"]["requests"]["mean"]
    alone = figures(*work, "--only-tenant", "2")["policies"]["random"]
    assert alone["summary"]["requests"]["mean"] == counts["2"]
    assert alone["tenants"]["2"]["completed"] == counts["2"]


@pytest.mark.parametrize(
    "arguments",
    [("--tenants", "9,0"), ("--tenants", "x"), ("--tenants", "9,1", "--only-tenant", "3"), ("--only-tenant", "1")],
)
def test_tenants_that_are_none_are_refused(arguments):
    """Shares are positive, and who is played alone is one of them."""
    done = simulate(*SMALL, *arguments)
    assert done.exit_code == 1
    assert "tenant" in done.output


@pytest.mark.parametrize("text", ["5,4", "now", "0", "5,5", "nan"])
def test_phases_that_do_not_follow_each_other_are_refused(text):
    """They are times that grow."""
    done = simulate(*SMALL, "--phases", text)
    assert done.exit_code == 1
    assert "--phases" in done.output
