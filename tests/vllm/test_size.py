"""`kvroute size` against real engines: their logs, their metrics, and a start that fails for lack of memory."""

import json
from pathlib import Path

from click.testing import CliRunner

from kvroute.adapters.size_io import read_model, read_usage
from kvroute.cli_size import size
from kvroute.sizing.engine_log import read_log
from kvroute.sizing.verdict import judge


def test_the_start_up_logs_agree(engines, model_dir):
    """The token count that each engine printed is the one that its model's shape and memory give, exactly."""
    for engine in engines.engines:
        log = read_log(Path(engine.log).read_text())
        verdict = judge(log, read_model(str(model_dir)))
        assert verdict.agrees is True
        assert verdict.expected_tokens == (log.tokens, log.tokens)


def test_the_command_finds_the_model_in_the_log(engines):
    """Without MODEL, the folder that the log names is read."""
    done = CliRunner().invoke(size, ["--log", engines.engines[0].log, "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["verdict"]["agrees"] is True


def test_metrics_and_model_of_a_replica(engines, replica_url, model_dir):
    """A replica's URL gives the same model as its folder, and its metrics the capacity that its log printed."""
    assert read_model(replica_url) == read_model(str(model_dir))
    (usage,) = read_usage(replica_url)
    assert usage.capacity_tokens == read_log(Path(engines.engines[0].log).read_text()).tokens


def test_the_command_reads_a_replica(replica_url):
    """`--metrics URL` says how close the engine is to its limit, and what each remedy would buy."""
    done = CliRunner().invoke(size, [replica_url, "--metrics", replica_url, "--json"])
    assert done.exit_code == 0, done.output
    (found,) = json.loads(done.stdout)["engines"]
    assert "idle" in found["state"]
    assert [one["name"] for one in found["remedies"]] == [
        "shorter context",
        "FP8 cache",
        "more memory",
        "fewer concurrent requests",
    ]
