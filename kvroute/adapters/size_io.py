"""Where `kvroute size` gets its input: files, folders, presets, and running replicas. All reads are bounded.

Heavy imports (YAML, HTTP, the metrics parser) happen where they are needed, so that the plain command stays quick.
"""

from __future__ import annotations

import json
import os
import re
import select
from pathlib import Path

from msgspec.structs import replace

from kvroute.errors import ConfigError
from kvroute.sizing.engine_log import LOG_BYTES_LIMIT
from kvroute.sizing.fields import shown
from kvroute.sizing.hardware import Hardware, hardware_of
from kvroute.sizing.model import CONFIG_BYTES_LIMIT, Model, model_from_json
from kvroute.sizing.presets import preset
from kvroute.sizing.remedies import Usage

INDEX_BYTES_LIMIT = 64 << 20
PAGE_BYTES_LIMIT = 16 << 20
COMPLAINT_CHARS = 200  # of a parser's complaint, which may quote the page
TIMEOUT_S = 5.0
WEIGHT_FILES = ("*.safetensors", "pytorch_model*.bin")


def read_model(name: str) -> Model:
    """Read a model from a folder, a config.json, a replica's URL, or a preset's name.

    Raises:
        ConfigError: nothing of the kind is there, or it is not a configuration.
    """
    if name.startswith(("http://", "https://")):
        return _model_of_replica(name)
    path = Path(name)
    try:
        if path.is_dir():
            return _with_files_size(read_config(path / "config.json"), path)
        if name and path.exists():
            return read_config(path)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror or error}") from None
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise ConfigError(f"{name}: no such file or folder")
    return preset(name)


def read_config(path: Path) -> Model:
    """Read one config.json, a pipe that delivers one included; the model is named after its folder."""
    data = read_bounded(path, CONFIG_BYTES_LIMIT)
    return model_from_json(data, path.parent.name if path.name == "config.json" and path.parent.name else path.name)


def read_bounded(path: Path, limit: int, wait_s: float = TIMEOUT_S) -> bytes:
    """Read a file, or a pipe that delivers something every `wait_s`, that must not be larger than `limit` bytes.

    Raises:
        ConfigError: it is larger, or cannot be read.
    """
    try:
        data = _read_pipe(path, limit, wait_s) if path.is_fifo() else _read_file(path, limit)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    if len(data) > limit:
        raise ConfigError(f"{path}: larger than {limit:,} bytes, which is too large for this kind of file")
    return data


def _read_file(path: Path, limit: int) -> bytes:
    with path.open("rb") as file:
        return file.read(limit + 1)


def _read_pipe(path: Path, limit: int, wait_s: float) -> bytes:
    """Read until the writer ends. One that is never there, or stops writing, is not waited for without end."""
    parts, size = [], 0
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        while size <= limit:
            if not select.select([file], [], [], wait_s)[0]:
                raise ConfigError(f"{path}: nothing came out of this pipe for {wait_s:.0f} s")
            part = file.read(min(1 << 16, limit + 1 - size))
            if not part:
                break
            parts.append(part)
            size += len(part)
    return b"".join(parts)


def read_log_text(path: Path) -> str:
    """Read a start-up log."""
    return read_bounded(path, LOG_BYTES_LIMIT).decode("utf-8", "replace")


def read_hardware(path: Path) -> Hardware:
    """Read custom hardware from YAML or JSON.

    Raises:
        ConfigError: not such a file, or a wrong field.
    """
    import yaml

    try:
        data = yaml.safe_load(read_bounded(path, CONFIG_BYTES_LIMIT))
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path}: a hardware file holds memory_gb, bandwidth_gb_s, tflops, ...")
    return hardware_of(data)


def read_usage(url: str) -> list[Usage]:
    """Ask a running replica how full its cache is; one value for each engine behind the URL.

    Raises:
        ConfigError: it cannot be reached, or does not report its cache's size.
    """
    from kvroute.adapters.vllm_metrics import read_page

    text = _fetch(f"{url.rstrip('/')}/metrics").decode("utf-8", "replace")
    try:
        page = read_page(text, 0.0)
    except ValueError as error:
        raise ConfigError(f"{url}/metrics: not a metrics page: {shown(str(error), COMPLAINT_CHARS)}") from None
    dtype = re.search(r'cache_dtype="([^"]*)"', text)
    found = [
        Usage(
            capacity_tokens=one.capacity_tokens,
            used_fraction=one.load.kv_used_fraction,
            running=one.load.running,
            waiting=one.load.waiting,
            preemptions=one.load.preemptions,
            cache_dtype=dtype[1] if dtype else "auto",
            max_model_len=_served(url)[1],
        )
        for one in page.engines
        if one.capacity_tokens
    ]
    if not found:
        raise ConfigError(f"{url}/metrics: no vllm:cache_config_info with the cache's size; is this a vLLM replica?")
    return found


def _model_of_replica(url: str) -> Model:
    root = _served(url)[0]
    if root is None:
        raise ConfigError(f"{url}/v1/models: no model is served there")
    if Path(root).is_dir():
        return _with_files_size(read_config(Path(root) / "config.json"), Path(root))
    try:
        return preset(root)
    except ConfigError:
        raise ConfigError(
            f"{url} serves {root!r}, which is neither a folder here nor a preset: give its config.json as MODEL"
        ) from None


def _served(url: str) -> tuple[str | None, int | None]:
    """Return the root and the context length of the base model that a replica serves."""
    try:
        cards = json.loads(_fetch(f"{url.rstrip('/')}/v1/models"))["data"]
        card = next((card for card in cards if not card.get("parent")), None)
        root, length = (card.get("root") or card.get("id"), card.get("max_model_len")) if card else (None, None)
    except (ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(f"{url}/v1/models: not a list of models") from None
    return root if isinstance(root, str) else None, length if isinstance(length, int) else None


def _fetch(url: str) -> bytes:
    from http.client import HTTPException
    from urllib.request import urlopen

    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"{url}: must begin with http:// or https://")
    try:
        with urlopen(url, timeout=TIMEOUT_S) as answer:
            data: bytes = answer.read(PAGE_BYTES_LIMIT + 1)
    except (OSError, ValueError, HTTPException) as error:
        raise ConfigError(f"{url}: {getattr(error, 'reason', None) or error}") from None
    if len(data) > PAGE_BYTES_LIMIT:
        raise ConfigError(f"{url}: the answer is larger than {PAGE_BYTES_LIMIT:,} bytes")
    return data


def _with_files_size(model: Model, folder: Path) -> Model:
    """Take the weights' size from the files beside the configuration, where they are there."""
    total = _indexed_bytes(folder / "model.safetensors.index.json")
    if total is None:
        total = max((sum(file.stat().st_size for file in folder.glob(kind)) for kind in WEIGHT_FILES), default=0)
    if not total or model.weights is None:
        return model
    return replace(model, weights=model.weights.resized(total))


def _indexed_bytes(path: Path) -> int | None:
    if not path.is_file():
        return None
    try:
        total = json.loads(read_bounded(path, INDEX_BYTES_LIMIT))["metadata"]["total_size"]
    except (ValueError, KeyError, TypeError):
        return None  # the files themselves are counted instead
    return total if isinstance(total, int) and total > 0 else None
