"""Real vLLM engines on the CPU: started, awaited, reset, stopped by process id.

    python tests/vllm/engines.py up -n 2 [-- more flags of `vllm serve`]
    python tests/vllm/engines.py down

`up` leaves the engines running and notes them in run/engines.json; `down` stops what is noted there and nothing else.
The tests use the class `Engines` and never leave anything running. Needs only the standard library, and what
tests/vllm/setup.sh installed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SERVED_NAME = "tiny"
BLOCK_SIZE = 32  # tokens; attention on the CPU takes multiples of 32 only
CONTEXT = 32_768  # tokens
KV_BYTES = 64 << 20  # 262,144 tokens of the tiny model
READY_S = 240.0  # 25 s alone, a minute when other work shares the machine
STOP_S = 20.0


@dataclass(frozen=True)
class Engine:
    """One running `vllm serve`."""

    name: str
    port: int
    pid: int
    log: str
    events_port: int  # KV events (PUB)
    replay_port: int  # KV event replay (ROUTER)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


def venv() -> Path:
    """Where tests/vllm/setup.sh put vLLM."""
    return (ROOT / os.environ.get("KVROUTE_VLLM_VENV", ".venv-vllm")).resolve()


def environment() -> dict[str, str]:
    """The engine's environment: no downloads, no usage reports, one compute thread that may run on any core."""
    return {
        **os.environ,
        "VLLM_TARGET_DEVICE": "cpu",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # by default, two engines pin themselves to the same cores
        "OMP_NUM_THREADS": "1",
        "VLLM_SERVER_DEV_MODE": "1",  # serves /reset_prefix_cache
    }


def command(model: Path, name: str, port: int, events_port: int, replay_port: int, extra: tuple[str, ...]) -> list[str]:
    """The command line of one engine."""
    events = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{events_port}",  # without the star, vLLM connects instead of binding
        "replay_endpoint": f"tcp://*:{replay_port}",
        "topic": f"kv@{name}@{SERVED_NAME}",
    }
    # fmt: off
    return [
        str(venv() / "bin" / "vllm"), "serve", str(model), "--served-model-name", SERVED_NAME,
        "--load-format", "dummy", "--enforce-eager", "--host", "127.0.0.1", "--port", str(port),
        "--block-size", str(BLOCK_SIZE), "--max-model-len", str(CONTEXT), "--kv-cache-memory-bytes", str(KV_BYTES),
        "--max-num-seqs", "64", "--enable-prefix-caching", "--enable-prompt-tokens-details",
        "--enable-request-id-headers", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--kv-events-config", json.dumps(events), *extra,
    ]
    # fmt: on


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(url + "/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Engines:
    """Several engines with one model. A context manager: whatever was started is stopped, even when starting fails."""

    def __init__(self, model: Path, run: Path) -> None:
        self.model, self.run = model, run
        self.engines: list[Engine] = []
        self.children: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Engines:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def urls(self) -> list[str]:
        return [engine.url for engine in self.engines]

    def start(self, ports: list[tuple[int, int, int]], *extra: str) -> Engines:
        """Start one engine for each (HTTP, events, replay) triple of ports and wait until all are healthy."""
        if not (venv() / "bin" / "vllm").exists():
            raise SystemExit(f"no vLLM in {venv()}: run tests/vllm/setup.sh first")
        self.run.mkdir(parents=True, exist_ok=True)
        for port, events_port, replay_port in ports:
            name = f"r{len(self.engines)}"
            log = self.run / f"{name}.log"
            with log.open("wb") as output:
                child = subprocess.Popen(
                    command(self.model, name, port, events_port, replay_port, extra),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    env=environment(),
                    start_new_session=True,  # stopped as a group: API server, engine core, worker
                )
            self.children[child.pid] = child
            self.engines.append(Engine(name, port, child.pid, str(log), events_port, replay_port))
        self.wait_until_healthy()
        return self

    def wait_until_healthy(self) -> None:
        deadline = time.monotonic() + READY_S
        for engine in self.engines:
            while not is_healthy(engine.url):
                if not is_alive(engine.pid) or time.monotonic() > deadline:
                    end = Path(engine.log).read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"{engine.name} is not healthy; the end of {engine.log}:\n{end}")
                time.sleep(0.25)

    def reset_caches(self) -> None:
        """Empty every prefix cache. The engines must be idle: a busy one refuses."""
        for engine in self.engines:
            request = urllib.request.Request(engine.url + "/reset_prefix_cache", method="POST")
            with urllib.request.urlopen(request, timeout=30) as answer:
                done = json.loads(answer.read() or b"{}")
            if done.get("success") is False:
                raise RuntimeError(f"{engine.name} is busy and kept its cache")

    def kill(self, number: int) -> None:
        """End one engine, with all of its processes, at once, as a crash would."""
        os.killpg(self.engines[number].pid, signal.SIGKILL)

    def stop(self) -> None:
        """End every engine, politely, then at once."""
        for engine in self.engines:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine.pid, signal.SIGTERM)
        deadline = time.monotonic() + STOP_S
        while time.monotonic() < deadline and any(self._is_running(engine.pid) for engine in self.engines):
            time.sleep(0.1)
        for engine in self.engines:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(engine.pid, signal.SIGKILL)
            if child := self.children.pop(engine.pid, None):
                child.wait(10)
        self.engines = []

    def _is_running(self, pid: int) -> bool:
        child = self.children.get(pid)
        return child.poll() is None if child else is_alive(pid)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("up", "down"))
    parser.add_argument("-n", type=int, default=2, help="how many engines")
    parser.add_argument("--port", type=int, default=8100, help="engine i serves HTTP on this + i, events on + 100 + 2i")
    parser.add_argument("--run", type=Path, default=ROOT / "run", help="folder for model, logs and engines.json")
    parser.add_argument("extra", nargs="*", help="after --: further flags of vllm serve")
    args = parser.parse_args()
    noted = args.run / "engines.json"
    engines = Engines(args.run / "model", args.run)
    if noted.exists():
        engines.engines = [Engine(**row) for row in json.loads(noted.read_text())]
    if args.what == "down":
        engines.stop()
        noted.unlink(missing_ok=True)
        return
    if any(is_alive(engine.pid) for engine in engines.engines):
        sys.exit(f"engines of {noted} are still running; stop them first: {sys.argv[0]} down")
    engines.engines = []
    maker = [venv() / "bin" / "python", Path(__file__).with_name("make_model.py"), engines.model]
    subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
    try:
        engines.start(
            [(args.port + i, args.port + 100 + 2 * i, args.port + 101 + 2 * i) for i in range(args.n)], *args.extra
        )
    except BaseException:
        engines.stop()
        raise
    noted.write_text(json.dumps([asdict(engine) for engine in engines.engines], indent=1) + "\n")
    print(*engines.urls)


if __name__ == "__main__":
    main()
