"""Input of `kvroute size`: files, folders, presets and running replicas."""

import contextlib
import http.server
import json
import os
import threading
from pathlib import Path

import pytest

from kvroute.adapters import size_io
from kvroute.adapters.size_io import read_bounded, read_hardware, read_log_text, read_model, read_usage
from kvroute.errors import ConfigError
from kvroute.sizing.presets import PRESETS, preset

METRICS = Path(__file__).parents[1] / "data" / "metrics" / "vllm-0.32-fresh.txt"
CONFIG = json.dumps(PRESETS["llama-3-8b"].config)


@pytest.fixture
def folder(tmp_path):
    """A model's folder without weights."""
    (tmp_path / "llama").mkdir()
    (tmp_path / "llama" / "config.json").write_text(CONFIG)
    return tmp_path / "llama"


@pytest.fixture
def serve():
    """Answer GET requests from a table of paths, on a real port; returns the address."""
    servers = []

    def start(pages):
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                body = pages.get(self.path)
                self.send_response(200 if body is not None else 404)
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, *args):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        servers.append((server, thread))
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server, thread in servers:
        server.shutdown()
        thread.join()
        server.server_close()


def models(root, **card):
    """A /v1/models page with one base model."""
    return json.dumps({"data": [{"id": "name", "root": root, "max_model_len": 8192, **card}]}).encode()


def test_a_folder_a_file_and_a_preset_are_the_same_model(folder):
    """All three ways give the same layers; the folder gives the name."""
    found = [read_model(str(folder)), read_model(str(folder / "config.json")), read_model("llama-3-8b")]
    assert found[0].layers == found[1].layers == found[2].layers
    assert found[0].name == "llama"


def test_the_weights_beside_a_configuration_are_measured(folder):
    """Files of weights, or their index, say the size better than the shape."""
    (folder / "model-1.safetensors").write_bytes(b"x" * 3_000)
    (folder / "model-2.safetensors").write_bytes(b"x" * 2_000)
    assert read_model(str(folder)).weights.total_bytes == 5_000
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {"total_size": 16_060_522_496}}))
    assert read_model(str(folder)).weights.total_bytes == 16_060_522_496


@pytest.mark.parametrize("name", ["./absent", "absent/config.json", "absent.json", "/absent/folder"])
def test_what_is_not_there(name):
    """A path that is not there is said to be none, not sought among presets."""
    with pytest.raises(ConfigError, match="no such file"):
        read_model(name)


def test_a_folder_without_a_configuration(tmp_path):
    """The missing file is named."""
    with pytest.raises(ConfigError, match=r"config\.json: No such file"):
        read_model(str(tmp_path))


def test_a_file_of_200_mb_is_refused(tmp_path):
    """Not more than the limit is read."""
    path = tmp_path / "big.json"
    with path.open("wb") as file:
        file.truncate(200 << 20)
    with pytest.raises(ConfigError, match="larger than"):
        read_model(str(path))
    with pytest.raises(ConfigError, match="larger than"):
        read_log_text(path)


def test_a_replica_tells_its_model(serve, folder):
    """The root of the base model is read where it is a folder here, or a preset."""
    assert read_model(serve({"/v1/models": models(str(folder))})).name == "llama"
    assert read_model(serve({"/v1/models": models("Qwen/Qwen3-8B")})).name == "qwen3-8b"
    with pytest.raises(ConfigError, match="neither a folder here nor a preset"):
        read_model(serve({"/v1/models": models("acme/secret")}))


@pytest.mark.parametrize("page", [b"", b"hello", b"[]", b'{"data": 3}', b'{"data": []}', b'{"data": [3]}'])
def test_what_is_no_replica(serve, page):
    """Anything else behind the URL is refused in one line."""
    with pytest.raises(ConfigError, match=r"/v1/models: "):
        read_model(serve({"/v1/models": page}))


def test_an_address_where_nobody_answers():
    """A closed port, a wrong name and a wrong scheme are errors of one line."""
    for url in ("http://127.0.0.1:9", "http://[bad", "http://127.0.0.1:99999"):
        with pytest.raises(ConfigError) as caught:
            read_model(url)
        assert "\n" not in str(caught.value)


def test_usage_of_a_running_replica(serve):
    """Capacity, use and preemptions come from a recorded page of vLLM's metrics."""
    url = serve({"/metrics": METRICS.read_bytes(), "/v1/models": models("x")})
    (usage,) = read_usage(url)
    assert usage.capacity_tokens == 262_144
    assert (usage.running, usage.cache_dtype, usage.max_model_len) == (0, "auto", 8_192)


def test_metrics_of_something_else(serve):
    """A page without the cache's size, and no page at all, are refused."""
    with pytest.raises(ConfigError, match="is this a vLLM replica"):
        read_usage(serve({"/metrics": b"up 1\n", "/v1/models": models("x")}))
    with pytest.raises(ConfigError, match="Not Found"):
        read_usage(serve({}))


def test_an_endless_answer_is_cut_off(serve):
    """More than the limit is refused."""
    url = serve({"/metrics": b"x" * (size_io.PAGE_BYTES_LIMIT + 1)})
    with pytest.raises(ConfigError, match="larger than"):
        read_usage(url)


def test_hardware_files(tmp_path):
    """YAML with the documented fields; anything else is refused."""
    path = tmp_path / "gpu.yaml"
    path.write_text("{name: mine, memory_gb: 48, bandwidth_gb_s: 864}")
    assert read_hardware(path).memory_bytes == 48 * 10**9
    for text, complaint in (
        ("[1]", "a hardware file holds"),
        ("{a: [", "not YAML"),
        ("{memory_gb: x}", "must be a number"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=complaint):
            read_hardware(path)


def written_later(path, data):
    """Write into a pipe from another thread, as another process would, until nobody reads any more."""

    def write():
        with contextlib.suppress(BrokenPipeError):
            path.write_bytes(data)

    writer = threading.Thread(target=write)
    writer.start()
    return writer


def test_a_pipe_delivers_a_configuration(tmp_path):
    """A configuration may come out of a pipe, as from a shell's process substitution."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = written_later(pipe, json.dumps(PRESETS["llama-3-8b"].config).encode())
    assert read_model(str(pipe)).layers == preset("llama-3-8b").layers
    writer.join()


def test_a_pipe_is_bounded(tmp_path):
    """Neither a pipe that delivers too much nor one that delivers nothing is read without end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = written_later(pipe, b" " * 70_000)
    with pytest.raises(ConfigError, match="too large"):
        read_bounded(pipe, 65_536)
    writer.join()
    silent = os.open(pipe, os.O_RDWR)
    try:
        with pytest.raises(ConfigError, match="nothing came out of this pipe"):
            read_bounded(pipe, 65_536, wait_s=0.05)
    finally:
        os.close(silent)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null"])
def test_devices_end_in_one_line(name):
    """An endless and an empty device are read to the limit or to their end, and refused."""
    with pytest.raises(ConfigError):
        read_model(name)


@pytest.mark.parametrize("url", ["file:///etc", "ftp://host", "host:8000"])
def test_only_http_is_fetched(url):
    """A URL of another kind is refused before anything is opened."""
    with pytest.raises(ConfigError, match="must begin with http"):
        read_usage(url)
