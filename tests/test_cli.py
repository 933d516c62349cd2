"""The command line: help, refusals in one line, and settings as they would be used."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from kvroute.cli import main
from tests.admin import fetch, until
from tests.processes import KVROUTE, Program, Router, SimulatedReplica, descendants


def run(*arguments):
    return CliRunner().invoke(main, list(arguments))


def test_help_lists_every_command():
    """Every command is listed with a line of its own."""
    result = run("--help")
    assert result.exit_code == 0
    for command in ("serve", "replica", "demo", "size", "doctor"):
        assert f"\n  {command} " in result.output


def test_show_config():
    """URLs and flags show up in the settings that are printed."""
    result = run("serve", "--show-config", "--port", "9", "--policy", "random", "http://a:1/", "http://b:2")
    assert result.exit_code == 0, result.output
    assert "url: http://a:1\n" in result.output
    assert "port: 9\n" in result.output
    assert "policy: random" in result.output


def test_a_replica_whose_port_is_taken_says_so_once():
    """One line with address, reason and remedy."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        result = run("replica", "--port", str(port))
    said = (
        f"Error: port: cannot listen on 127.0.0.1:{port}: Address already in use; choose another, or 0 for any free one"
    )
    assert (result.exit_code, result.output.strip()) == (1, said)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve"], "no replica given"),
        (["serve", "gpu1:8000"], "http://"),
        (["serve", "--policy", "best", "http://a"], "round-robin"),
        (["serve", "-c", "/nowhere/x.yaml"], "/nowhere/x.yaml"),
        (["serve", "--redis", "http://a", "http://b"], "redis://"),
        (["replica", "--block-size", "0"], "--block-size"),
    ],
)
def test_refusals(arguments, words):
    """What cannot work is refused in one line that says why, without a trace."""
    result = run(*arguments)
    assert result.exit_code != 0
    assert words in result.output
    assert "Traceback" not in result.output


def test_help_is_quick():
    """Help imports no service: neither aiohttp nor a tokenizer."""
    code = (
        "import sys, kvroute.cli; print([m for m in ('aiohttp', 'fastokens', 'redis', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_a_single_process_survives_a_hang_up(tmp_path):
    """At SIGHUP a single process takes on the policy of its settings, and says what needs a restart."""
    file = tmp_path / "kvroute.yaml"
    settings = "store: {kind: memory}\nreplicas: [{url: http://127.0.0.1:9}]\n"
    file.write_text(settings)
    with Router("-c", str(file), log=tmp_path / "router.log", workers=None) as router:
        file.write_text(settings + "routing: {policy: lmetric, ttft_weight: 0.5, shadow: [kvroute]}\ntokenizer: none\n")
        router.signal(signal.SIGHUP)
        assert "tokenizer" in router.said("a restart would change: (.*)")[1]
        state = json.loads(fetch(f"{router.admin}/admin/policy"))
        assert (state["policy"], state["ttft_weight"], state["shadow"]) == ("lmetric", 0.5, ["kvroute"])
        file.write_text("routing: {policy: best}")
        router.signal(signal.SIGHUP)
        assert "routing.policy" in router.said("the new settings are not used: (.*)")[1]
        assert descendants(router.pid) == set()
        assert router.stop() == 0


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_ctrl_c_breaks_off_what_is_left(tmp_path, workers):
    """It ends in order, without waiting for requests; the first one let them go on."""
    with (
        SimulatedReplica(log=tmp_path / "replica.log") as replica,
        Router(replica.url, log=tmp_path / "router.log", workers=workers) as router,
        socket.create_connection(("127.0.0.1", urlsplit(router.url).port), timeout=60) as client,
    ):
        fields = {"stream": True, "max_tokens": 20_000, "ignore_eos": True}  # minutes
        body = json.dumps({"messages": [{"role": "user", "content": "hello"}], **fields}).encode()
        head = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        client.sendall(f"POST /v1/chat/completions HTTP/1.0\r\n{head}".encode() + body)
        assert b"200 OK" in client.recv(65536)
        router.signal(signal.SIGINT)
        assert until(lambda: is_ready(router.admin), lambda ready: not ready, 20) is False
        assert client.recv(65536), "it goes on"
        router.signal(signal.SIGINT)
        assert until(lambda: router.code, lambda code: code is not None, 20) == 0
        with contextlib.suppress(ConnectionResetError):
            while client.recv(1 << 20):
                pass
        assert "Traceback" not in router.text


def is_ready(admin: str) -> bool:
    try:
        return bool(json.loads(fetch(f"{admin}/ready"))["ready"])
    except OSError:  # 503, or nobody listens any longer
        return False


def test_as_many_files_as_allowed(tmp_path):
    """Whatever the shell began with, a service may open as many files as its user may have."""
    shell = ["sh", "-c", 'ulimit -Sn 256; exec "$@"', "sh"]
    with Program([*shell, *KVROUTE, "replica", "--port", "0"], tmp_path / "replica.log") as replica:
        replica.said("http://")
        limits = Path(f"/proc/{replica.pid}/limits").read_text()
    (line,) = [line.split() for line in limits.splitlines() if line.startswith("Max open files")]
    assert line[3] == line[4] != "256"
