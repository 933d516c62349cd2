"""`kvroute doctor` as an operator runs it, on real processes."""

import asyncio
import json
import os
import subprocess

import pytest
from click.testing import CliRunner

from kvroute.cli_doctor import doctor
from tests import redis_servers
from tests.certificates import make_certificates, terminated
from tests.processes import KVROUTE, SimulatedReplica

pytestmark = pytest.mark.slow  # real processes, many of them


def run(*arguments, **options):
    """Run the command in a process of its own, its output piped."""
    return subprocess.run(
        [*KVROUTE, "doctor", *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )


def words_of(done):
    """Return what was printed without its line breaks."""
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Two replicas that are well and one whose blocks are larger."""
    logs = tmp_path_factory.mktemp("logs")
    sizes = ("16", "16", "32")
    started = [
        SimulatedReplica("--block-size", size, "--faults", log=logs / f"{number}.log").start()
        for number, size in enumerate(sizes)
    ]
    yield [replica.url for replica in started]
    for replica in started:
        replica.stop()


def test_a_pool_that_is_well(pool):
    """The exit status is 0, and each replica is said to be well."""
    done = run(*pool[:2])
    assert done.returncode == 0, done.stderr
    assert words_of(done).count("hash probe: ") == 2
    assert "2 replicas examined: routing would be blind nowhere." in words_of(done)


def test_a_warning_is_no_failure(pool):
    """Replicas with different blocks are named; routing still sees."""
    done = run(*pool)
    assert done.returncode == 0, done.stderr
    assert f"32 tokens on {pool[2]}" in words_of(done)


def test_a_replica_that_is_gone(pool):
    """The exit status is 1, the replica is named with its fault, and the others are examined nevertheless."""
    done = run(pool[0], "http://127.0.0.1:9")
    assert done.returncode == 1
    assert "FAIL health: /health: Connection refused." in words_of(done)
    assert "1 of 2 replicas" in words_of(done)
    assert "hash probe: " in words_of(done)


def test_output_in_a_pipe_is_plain_and_narrow(pool):
    """80 columns, no escape sequences."""
    text = run(pool[0], "http://127.0.0.1:9").stdout
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) <= 80


def test_json(pool):
    """Scripts read the same: findings with their parts, and the facts behind them."""
    done = run(pool[0], "http://127.0.0.1:9", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["blind"]) == (1, True)
    well, gone = found["replicas"]
    assert well["facts"]["probes"][0]["cached_tokens"] == [0, well["facts"]["probes"][0]["predicted_tokens"]]
    assert [(one["check"], one["level"]) for one in gone["findings"]] == [("health", "fail")]
    assert gone["findings"][0]["remedy"]


def test_a_replica_that_breaks_under_the_probe(pool):
    """An engine that fails requests while it answers /health is found out."""
    subprocess.run(
        ["curl", "-sf", f"{pool[0]}/_fault", "-d", '{"kind": "error_before", "count": 1}'], check=True, timeout=20
    )
    done = run(pool[0])
    assert done.returncode == 1
    assert "FAIL hash probe: could not be sent: /v1/chat/completions answered 500" in words_of(done)


def test_the_settings_file_of_serve_is_read(pool, tmp_path):
    """-c takes replicas, tokenizer and store from kvroute's own file."""
    with redis_servers.server() as server:
        settings = {"replicas": [{"url": url} for url in pool[:2]], "tokenizer": "none", "store": {"url": server.url}}
        (tmp_path / "kvroute.yaml").write_text(json.dumps(settings))
        done = run("-c", str(tmp_path / "kvroute.yaml"), "--json")
        found = json.loads(done.stdout)
    assert (done.returncode, len(found["replicas"]), found["store_facts"]["url"]) == (0, 2, server.url)
    assert "as configured" in words_of(done)


def test_a_store_that_evicts_fails(pool):
    """--redis is looked at as well."""
    with redis_servers.server("--maxmemory-policy", "allkeys-lfu") as server:
        done = run(pool[0], "--redis", server.url)
    assert done.returncode == 1
    assert "FAIL redis: maxmemory-policy is allkeys-lfu" in words_of(done)
    assert "blind without its store" in words_of(done)


def test_kv_events_are_heard(tmp_path):
    """A replica that publishes is heard, and gives its last batch again; without a replay socket that is said."""
    for replay, expected in ((("--kv-events-replay", "tcp://*:0"), []), ((), ["replay"])):
        with SimulatedReplica("--kv-events", "tcp://*:0", *replay, log=tmp_path / "replica.log") as replica:
            done = run(replica.url, "--json")
        [verdict] = json.loads(done.stdout)["replicas"]
        assert verdict["facts"]["events"][0]["heard"] >= 1
        assert [one["check"] for one in verdict["findings"] if one["level"] == "warn"] == expected
        assert done.returncode == 0


def test_events_that_the_settings_do_not_want(pool):
    """With events.mode off nothing is said about them."""
    done = run(pool[0], "--json", env={**os.environ, "KVROUTE_EVENTS__MODE": "off"})
    [verdict] = json.loads(done.stdout)["replicas"]
    assert "kv events" not in {one["check"] for one in verdict["findings"]}


async def test_replicas_behind_https(pool, tmp_path):
    """The authority that the settings name is believed; without it the certificate is the finding, with its remedy."""
    files = make_certificates(tmp_path)
    async with terminated(int(pool[1].rpartition(":")[2]), files.server()) as port:
        url = f"https://127.0.0.1:{port}"
        trusted = await asyncio.to_thread(run, url, env={**os.environ, "KVROUTE_PROXY__TLS_CA": str(files.authority)})
        stranger = await asyncio.to_thread(run, url)
    assert trusted.returncode == 0, trusted.stdout + trusted.stderr
    assert stranger.returncode == 1
    assert "CERTIFICATE_VERIFY_FAILED" in stranger.stdout
    assert "proxy.tls_ca" in stranger.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "no replica given"),
        (["gpu1:8000"], "http://"),
        (["http://127.0.0.1:9", "--redis", "http://a"], "redis://"),
        (["http://127.0.0.1:9", "--tokenizer", "/absent"], "/absent holds no tokenizer.json"),
        (["http://127.0.0.1:9", "--kv-events", "gpu1:5557"], "tcp://HOST:PORT"),
        (["http://127.0.0.1:9", "--api-key", "two words"], "api_key"),
    ],
)
def test_refusals(arguments, words):
    """What cannot work is refused in one line before anything is asked."""
    done = CliRunner().invoke(doctor, arguments)
    assert done.exit_code == 1
    assert words in done.output
    assert "Traceback" not in done.output
