"""`kvroute serve --workers 2` as its user meets it: real processes, real signals, and nothing left behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
import urllib.request
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from kvroute.config import load
from kvroute.errors import ConfigError
from kvroute.workers.supervisor import check_reload
from tests.admin import fetch, hit_rate, metric, replicas, until
from tests.chaos.clients import Seen, chat, stream
from tests.processes import KVROUTE, Router, SimulatedReplica, descendants

pytestmark = pytest.mark.slow  # real processes, many of them

PATIENCE_S = 20.0  # for what takes a second or two
STREAMS = 24
LONG = {"max_tokens": 300, "ignore_eos": True}  # some seconds


def two_workers(replica: SimulatedReplica, log: Path, **more: Any) -> Router:
    return Router(replica.url, log=log, workers=2, **more)


def workers(router: Router) -> set[int]:
    """Return the process ids of the workers that live."""
    found = set()
    for pid in descendants(router.pid):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"worker" in command:
            found.add(pid)
    return found


def alive(pids: set[int]) -> set[int]:
    return {pid for pid in pids if is_alive(pid)}


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def session(router: Router) -> aiohttp.ClientSession:
    """Return a session that opens a connection for each request, so that every worker is met."""
    return aiohttp.ClientSession(router.url, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def streams(http: aiohttp.ClientSession, count: int = STREAMS) -> tuple[list[Seen], list[asyncio.Task[Seen]]]:
    """Begin long answers and return them when all have begun."""
    everyone = [Seen() for _ in range(count)]
    tasks = [asyncio.ensure_future(stream(http, chat(f"tale {n}", **LONG), seen)) for n, seen in enumerate(everyone)]
    async with asyncio.timeout(PATIENCE_S):
        for seen in everyone:
            await seen.began.wait()
    return everyone, tasks


async def ended(tasks: list[asyncio.Task[Seen]]) -> None:
    await asyncio.wait_for(asyncio.gather(*tasks), 60)


def test_both_workers_serve_and_look_like_one(replica, tmp_path):
    """Requests go to two processes, and one admin listener tells the sum of both."""

    async def ask(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            assert metric(router.admin, "kvroute_requests_active") == STREAMS
            (row,) = replicas(router.admin)
            assert row["promised_here"]["requests"] == STREAMS
            port = int(router.url.rpartition(":")[2])
            shares = [connections_of(pid, port) for pid in workers(router)]
            assert shares == [STREAMS / 2, STREAMS / 2]
            await ended(tasks)
            assert [seen for seen in everyone if not seen.is_done] == []

    with two_workers(replica, tmp_path / "router.log") as router:
        assert len(workers(router)) == 2
        asyncio.run(ask(router))
        assert metric(router.admin, "kvroute_requests_total", outcome="done") == STREAMS
        assert metric(router.admin, "kvroute_ttft_seconds_count") == STREAMS
        assert metric(router.admin, "kvroute_workers") == 2
        hit_rate(router.admin, requests=STREAMS)
        assert '"ready": true' in fetch(f"{router.admin}/ready")
        assert "<html" in fetch(f"{router.admin}/")


def connections_of(pid: int, port: int) -> int:
    """Count a process's accepted connections to a local port."""
    inodes = set()
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == "01" and f"socket:[{row[9]}]" in inodes for row in rows)


def test_a_killed_worker_costs_only_its_own_answers(replica, tmp_path):
    """Answers of the other worker go on, the dead one is replaced, and no counter falls."""

    async def kill_one(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            victim, other = sorted(workers(router))
            theirs = connections_of(victim, int(router.url.rpartition(":")[2]))
            os.kill(victim, signal.SIGKILL)
            await ended(tasks)
        broken = [seen for seen in everyone if not seen.is_done]
        assert len(broken) == theirs
        assert 0.4 * STREAMS <= theirs <= 0.6 * STREAMS
        assert all(seen.error for seen in broken)
        assert other in workers(router)

    with two_workers(replica, tmp_path / "router.log") as router:
        asyncio.run(answered(router, 10))
        before = metric(router.admin, "kvroute_requests_total")
        assert before == 10
        asyncio.run(kill_one(router))
        assert metric(router.admin, "kvroute_requests_total") > before
        assert until(lambda: metric(router.admin, "kvroute_workers"), lambda n: n == 2, PATIENCE_S) == 2
        assert metric(router.admin, "kvroute_worker_restarts_total") == 1
        asyncio.run(answered(router, 20))


async def answered(router: Router, count: int) -> None:
    """Ask for so many short answers, and get all of them."""
    async with session(router) as http:
        asked = [stream(http, chat(f"ask {n}", max_tokens=2), Seen()) for n in range(count)]
        everyone = await asyncio.wait_for(asyncio.gather(*asked), 60)
    assert [seen.error for seen in everyone if not seen.is_done] == []


@pytest.mark.slow
def test_connections_that_come_while_a_worker_is_replaced_wait(replica, tmp_path):
    """Between a worker's death and its successor nobody is refused."""
    with two_workers(replica, tmp_path / "router.log") as router:
        os.kill(min(workers(router)), signal.SIGKILL)
        asyncio.run(answered(router, 30))


def test_a_killed_supervisor_takes_everything_along(replica, tmp_path):
    """Workers, embedded server, sockets and directories are gone soon after the supervisor was."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()
    with two_workers(replica, tmp_path / "router.log", env={"TMPDIR": str(scratch)}) as router:
        family = descendants(router.pid)
        assert len(family) >= 3
        router.kill()
    assert until(lambda: alive(family), lambda left: not left, PATIENCE_S) == set()
    assert until(lambda: list(scratch.iterdir()), lambda left: not left, PATIENCE_S) == []


@pytest.mark.slow
def test_a_killed_supervisor_lets_answers_end(replica, tmp_path):
    """What is under way at its workers is answered in full before they go."""

    async def kill_it(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            router.kill()
            await ended(tasks)
        assert [seen.error for seen in everyone if not seen.is_done] == []

    with two_workers(replica, tmp_path / "router.log") as router:
        family = descendants(router.pid)
        asyncio.run(kill_it(router))
        assert until(lambda: alive(family), lambda left: not left, PATIENCE_S) == set()


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_leaves_nothing(replica, tmp_path):
    """At SIGTERM no connection is taken any more, answers end, and all processes are gone with status 0."""
    scratch = tmp_path / "tmp"
    scratch.mkdir()

    async def stop_it(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            router.signal(signal.SIGTERM)
            async with asyncio.timeout(PATIENCE_S):
                while (await stream(http, chat("late", max_tokens=1), Seen())).is_done:
                    await asyncio.sleep(0.05)
            assert not all(task.done() for task in tasks), "they ended before the stop: the test showed nothing"
            await ended(tasks)
        assert [seen.error for seen in everyone if not seen.is_done] == []

    with two_workers(replica, tmp_path / "router.log", env={"TMPDIR": str(scratch)}) as router:
        family = descendants(router.pid)
        asyncio.run(stop_it(router))
        assert router.process.wait(PATIENCE_S) == 0
    assert alive(family) == set()
    assert list(scratch.iterdir()) == []
    assert "replaced" not in router.text


def settings_file(tmp_path: Path, replica: SimulatedReplica, **more: object) -> Path:
    path = tmp_path / "kvroute.yaml"
    path.write_text(yaml.safe_dump({"replicas": [{"url": replica.url}], **more}))
    return path


@pytest.mark.slow
def test_sighup_brings_new_settings_without_losing_a_request(replica, tmp_path):
    """While requests come all the time, new workers take over; none fails, and the old ones finish what they began."""
    file = settings_file(tmp_path, replica)
    prediction = "x-kvroute-predicted-tokens"

    async def reload_it(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            old = workers(router)
            settings_file(tmp_path, replica, proxy={"expose_prediction": True})
            router.signal(signal.SIGHUP)
            is_new, deadline = False, time.monotonic() + PATIENCE_S
            while not (is_new and not workers(router) & old) and time.monotonic() < deadline:
                async with http.post("/v1/chat/completions", json=chat("hello", max_tokens=1)) as answer:
                    assert answer.status == 200
                    is_new = prediction in answer.headers
                    await answer.read()
            await ended(tasks)
            assert is_new
            assert [seen.error for seen in everyone if not seen.is_done] == []
            assert until(lambda: workers(router) & old, lambda left: not left, PATIENCE_S) == set()
            assert len(workers(router)) == 2

    with Router("-c", str(file), log=tmp_path / "router.log", workers=2) as router:
        asyncio.run(reload_it(router))
        assert metric(router.admin, "kvroute_requests_total", outcome="done") > STREAMS
        assert metric(router.admin, "kvroute_worker_restarts_total") == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"routing": {"policy": "best"}}, "routing.policy"),
        ({"store": {"deployment": "other"}}, "`store` cannot change"),
        ({"tokenizer": "/nowhere"}, "/nowhere"),  # which only a worker finds out
    ],
)
def test_settings_that_cannot_work_change_nothing(replica, tmp_path, change, words):
    """A reload that fails is logged with its reason, and the workers that were there go on."""
    file = settings_file(tmp_path, replica)
    with Router("-c", str(file), log=tmp_path / "router.log", workers=2) as router:
        before = workers(router)
        settings_file(tmp_path, replica, **change)
        router.signal(signal.SIGHUP)
        line = router.said(r"the new settings are not used: (.*)", PATIENCE_S)
        assert words in line[1]
        assert until(lambda: workers(router), lambda now: now == before, PATIENCE_S) == before
        asyncio.run(answered(router, 10))


@pytest.mark.slow
def test_every_worker_follows_another_policy(replica, tmp_path):
    """An order on the admin listener, and settings that differ in nothing else, reach all workers and replace none."""
    file = settings_file(tmp_path, replica)

    def followed(router: Router) -> dict[str, float]:
        rows = json.loads(fetch(f"{router.admin}/admin/shadow"))["shadows"]
        return {row["policy"]: row["placements"] for row in rows}

    with Router("-c", str(file), log=tmp_path / "router.log", workers=2) as router:
        before = workers(router)
        order = json.dumps({"policy": "least-request", "shadow": ["kvroute"]}).encode()
        with urllib.request.urlopen(f"{router.admin}/admin/policy", data=order, timeout=10) as answer:
            assert json.load(answer)["policy"] == "least-request"
        asyncio.run(answered(router, 20))
        assert followed(router) == {"kvroute": 20}
        settings_file(tmp_path, replica, routing={"policy": "lmetric", "shadow": ["random", "kvroute"]})
        router.signal(signal.SIGHUP)
        router.said("go on with another policy", PATIENCE_S)
        assert until(lambda: followed(router), lambda rows: "random" in rows, PATIENCE_S) == {"random": 0, "kvroute": 0}
        asyncio.run(answered(router, 20))
        assert followed(router) == {"random": 20, "kvroute": 20}
        assert workers(router) == before
        assert json.loads(fetch(f"{router.admin}/admin/policy"))["policy"] == "lmetric"
        assert json.loads(fetch(f"{router.admin}/admin/holds"))["is_on"] is False
        data = json.dumps({"prompt": "x " * 400_000}).encode()  # more than aiohttp takes unasked
        with urllib.request.urlopen(f"{router.admin}/admin/explain", data=data, timeout=30) as answer:
            assert json.load(answer)["policy"] == "lmetric"


@pytest.mark.slow
def test_workers_that_come_later_follow_the_policy_that_was_ordered(replica, tmp_path):
    """When every worker has been killed and replaced, requests still go by the order and not by the settings."""
    with two_workers(replica, tmp_path / "router.log") as router:
        order = json.dumps({"policy": "least-request"}).encode()
        with urllib.request.urlopen(f"{router.admin}/admin/policy", data=order, timeout=10) as answer:
            assert answer.status == 200
        for pid in workers(router):
            before = workers(router)
            os.kill(pid, signal.SIGKILL)
            replaced = until(lambda: workers(router) - before, bool, PATIENCE_S)  # noqa: B023 - read at once
            assert len(replaced) == 1
            until(lambda: json.loads(fetch(f"{router.admin}/health"))["workers"], lambda n: n == 2, PATIENCE_S)
        assert json.loads(fetch(f"{router.admin}/admin/policy"))["policy"] == "least-request"


@pytest.mark.slow
def test_a_reload_changes_the_number_of_workers(replica, tmp_path):
    """With another number in the file there are as many processes, and every connection finds one."""
    file = settings_file(tmp_path, replica, workers=3)
    with Router("-c", str(file), log=tmp_path / "router.log", workers=None) as router:
        assert len(workers(router)) == 3
        settings_file(tmp_path, replica, workers=1)
        router.signal(signal.SIGHUP)
        assert until(lambda: len(workers(router)), lambda count: count == 1, PATIENCE_S) == 1
        asyncio.run(answered(router, 20))


@pytest.mark.slow
def test_a_worker_that_is_asked_to_end_is_replaced_before_it_has(replica, tmp_path):
    """SIGTERM for one worker: its place is taken at once, and it ends what it began."""

    async def ask_one(router: Router) -> None:
        async with session(router) as http:
            everyone, tasks = await streams(http)
            leaver = min(workers(router))
            os.kill(leaver, signal.SIGTERM)
            assert until(lambda: len(workers(router)), lambda count: count == 3, PATIENCE_S) == 3
            await answered(router, 20)
            await ended(tasks)
        assert [seen.error for seen in everyone if not seen.is_done] == []
        assert until(lambda: leaver in workers(router), lambda lives: not lives, PATIENCE_S) is False

    with two_workers(replica, tmp_path / "router.log") as router:
        asyncio.run(ask_one(router))
        assert metric(router.admin, "kvroute_worker_restarts_total") == 0


@pytest.mark.slow
def test_a_drained_replica_stays_drained_in_a_new_worker(replica, tmp_path):
    """What was drained before a worker died is drained at its successor."""
    with two_workers(replica, tmp_path / "router.log") as router:
        done = subprocess.run(
            ["curl", "-sf", "-X", "POST", f"{router.admin}/admin/drain?replica={replica.url}"], check=True, timeout=10
        )
        assert done.returncode == 0
        for pid in workers(router):
            os.kill(pid, signal.SIGKILL)
        assert until(lambda: metric(router.admin, "kvroute_worker_restarts_total"), lambda n: n == 2, PATIENCE_S) == 2
        assert until(lambda: metric(router.admin, "kvroute_workers"), lambda n: n == 2, PATIENCE_S) == 2
        assert metric(router.admin, "kvroute_replica_draining") == 1
        assert '"ready": false' in fetch_any(f"{router.admin}/ready")


def fetch_any(url: str) -> str:
    return subprocess.run(["curl", "-s", url], capture_output=True, text=True, check=True, timeout=10).stdout


def test_a_start_that_cannot_work_says_why_once(replica, tmp_path):
    """What a worker finds out at its start is one line of the command, and nothing is left."""
    command = [*KVROUTE, "serve", "--workers", "2", "--port", "0", "--admin-port", "0", "--tokenizer", "/nowhere"]
    done = subprocess.run([*command, replica.url], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    errors = [line for line in done.stderr.splitlines() if line.startswith("Error")]
    assert len(errors) == 1
    assert "/nowhere" in errors[0]
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_taken_port_is_named(replica, tmp_path):
    """A second router on the same port is refused, although sockets could share it."""
    with two_workers(replica, tmp_path / "router.log") as router:
        port = router.url.rpartition(":")[2]
        command = [*KVROUTE, "serve", "--workers", "2", "--port", port, "--admin-port", "0", replica.url]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert f"`listen`: cannot listen on 127.0.0.1:{port}" in done.stderr


@pytest.mark.parametrize("name", ["listen", "admin", "store"])
def test_what_needs_a_restart_is_refused(name):
    """A change that a reload cannot make names its section."""
    change = {"listen": {"listen.port": 1}, "admin": {"admin.port": 1}, "store": {"store.url": "redis://a"}}[name]
    replicas = {"replicas": [{"url": "http://a"}]}
    old = load(None, env={}, overrides=replicas)
    check_reload(old, load(None, env={}, overrides=replicas | {"routing.policy": "random"}))
    with pytest.raises(ConfigError, match=f"`{name}` cannot change"):
        check_reload(old, load(None, env={}, overrides=replicas | change))
